//! Keeps a held stream alive: its head goes out at once and comments follow, so that no proxy on the way takes it for dead.
//! What goes wrong after that can only be said within the stream.

use std::future::poll_fn;
use std::pin::Pin;
use std::time::Duration;

use bytes::Bytes;
use http_body::Body;
use hyper::header::{ACCEPT, CACHE_CONTROL, CONTENT_TYPE, HeaderValue};
use hyper::http::request::Parts;
use hyper::{Response, StatusCode};
use serde::Deserialize;
use tokio::sync::mpsc;
use tokio::time::{Instant, interval_at};

use crate::body::{Fault, Outgoing, Reply};
use crate::forward::{Client, forward};
use crate::headers;
use crate::refusals::Reason;
use crate::seat::Ticket;

const EVENTS: &str = "text/event-stream";
const COMMENT: &[u8] = b": waiting for the model server\n\n";
/// Of a reply that is no stream, in bytes.
const SAID: usize = 4096;

type Lines = mpsc::Sender<Result<Bytes, Fault>>;

#[derive(Deserialize)]
struct Wish {
    #[serde(default)]
    stream: bool,
}

/// Whether the client will read a stream of events: it says so in its head, or as OpenAI's clients do in the body.
pub fn is_asked_for(parts: &Parts, body: &Outgoing) -> bool {
    let accepted = parts
        .headers
        .get(ACCEPT)
        .and_then(|accept| accept.to_str().ok())
        .unwrap_or("");
    accepted.to_ascii_lowercase().contains(EVENTS)
        || serde_json::from_slice::<Wish>(&body.filled()).is_ok_and(|wish| wish.stream)
}

/// Answers with a stream at once, into which the server's goes when there is one.
pub fn keep_alive(client: Client, ticket: Ticket, parts: Parts, body: Outgoing, every: Duration) -> Response<Reply> {
    let (lines, told) = mpsc::channel(1);
    tokio::spawn(async move {
        let gone = lines.clone();
        tokio::select! {
            () = gone.closed() => {}
            () = tell(&lines, client, ticket, parts, body, every) => {}
        }
    });
    let mut response = Response::new(Reply::Told(told));
    response.headers_mut().insert(
        CONTENT_TYPE,
        HeaderValue::from_static("text/event-stream; charset=utf-8"),
    );
    response
        .headers_mut()
        .insert(CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    response
}

async fn tell(lines: &Lines, client: Client, mut ticket: Ticket, mut parts: Parts, body: Outgoing, every: Duration) {
    let seat = client.seat.clone();
    headers::uncompressed(&mut parts);
    let answered = async {
        let pass = ticket.wait().await?;
        forward(&client, pass, parts, body, true).await
    };
    tokio::pin!(answered);
    let mut comments = interval_at(Instant::now(), every);
    let answer = loop {
        tokio::select! {
            answer = &mut answered => break answer,
            _ = comments.tick() => {
                if lines.send(Ok(Bytes::from_static(COMMENT))).await.is_err() {
                    return;
                }
            }
        }
    };
    let failed = match answer {
        Ok(response) => pour(lines, response).await,
        Err(reason) => Err(reason),
    };
    if let Err(reason) = failed {
        let _ = lines.send(Ok(reason.event(&seat.served().route))).await;
    }
}

/// The server's stream into ours.
async fn pour(lines: &Lines, response: Response<Reply>) -> Result<(), Reason> {
    let status = response.status();
    let kind = response
        .headers()
        .get(CONTENT_TYPE)
        .and_then(|kind| kind.to_str().ok())
        .unwrap_or("");
    let stream = status == StatusCode::OK && kind.to_ascii_lowercase().starts_with(EVENTS);
    let mut body = response.into_body();
    let mut said = Vec::new();
    while let Some(frame) = poll_fn(|context| Pin::new(&mut body).poll_frame(context)).await {
        let data = match frame.map(|frame| frame.into_data()) {
            Ok(Ok(data)) => data,
            Ok(Err(_)) => continue, // trailers
            Err(error) => return Err(Reason::Broken(error.to_string())),
        };
        if stream {
            if lines.send(Ok(data)).await.is_err() {
                return Ok(());
            }
        } else {
            said.extend_from_slice(&data[..data.len().min(SAID - said.len())]);
            if said.len() == SAID {
                break;
            }
        }
    }
    if stream {
        Ok(())
    } else {
        Err(Reason::NoStream(status, String::from_utf8_lossy(&said).into_owned()))
    }
}
