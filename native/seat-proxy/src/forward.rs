//! One request, from the port it came to to the answer: the port alone says whose it is, never anything that it contains.

use std::convert::Infallible;
use std::net::IpAddr;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use http_body::Body;
use hyper::body::Incoming;
use hyper::header::{CONTENT_TYPE, EXPECT, HeaderValue};
use hyper::http::request::Parts;
use hyper::upgrade::OnUpgrade;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use tokio::sync::oneshot;
use tokio::time::timeout;

use crate::body::{Outgoing, Passing, Reply};
use crate::headers;
use crate::paths::Class;
use crate::pool::{Failure, send_alone};
use crate::refusals::Reason;
use crate::seat::{Pass, Seat, Served, Ticket, Verdict};
use crate::streams;

/// Of a held request's body, in bytes: beyond it the client is made to wait as well.
pub const HELD_BODY: usize = 256 * 1024;
/// How long a parked server may take for a quiet path.
const QUIET: Duration = Duration::from_secs(5);

/// A client's connection: who it is, and how many of its requests are in flight.
#[derive(Clone)]
pub struct Client {
    pub seat: Arc<Seat>,
    pub address: IpAddr,
    pub busy: Arc<AtomicUsize>,
}

/// Answers a request; there is always an answer, if only that there is none.
pub async fn serve(client: Client, request: Request<Incoming>) -> Result<Response<Reply>, Infallible> {
    let seat = &client.seat;
    seat.counts.requests.add(1);
    let served = seat.served();
    let (parts, body) = request.into_parts();
    let grpc = headers::is_grpc(&parts);
    let refuse = |served: &Served, reason: Reason| {
        if grpc {
            reason.grpc(&served.route)
        } else {
            reason.response(&served.route)
        }
    };
    if parts.method == Method::CONNECT {
        return Ok(refuse(&served, Reason::Connect));
    }
    let quiet = match served.paths.class(parts.uri.path()) {
        Class::Blocked => {
            seat.counts.blocked.add(1);
            return Ok(refuse(
                &served,
                Reason::Blocked(parts.uri.path().chars().take(200).collect()),
            ));
        }
        Class::Quiet(_) => true,
        Class::Ordinary => false,
    };
    let answer = match seat.admit(&client.busy, quiet) {
        Verdict::Forward(pass) => forward(&client, pass, parts, Outgoing::new(body), false).await,
        Verdict::Wait(ticket) => held(&client, ticket, parts, body).await,
        Verdict::Parked(served) => parked(&client, &served, parts, body).await,
        Verdict::Refuse(reason) => Err(reason),
    };
    // What the node said last, and not what it said when the request came.
    Ok(answer.unwrap_or_else(|reason| refuse(&seat.served(), reason)))
}

/// Keeps a request until its seat is open. Its body is read meanwhile, for only so it is seen that a client has gone.
async fn held(client: &Client, mut ticket: Ticket, parts: Parts, body: Incoming) -> Result<Response<Reply>, Reason> {
    let mut body = Outgoing::new(body);
    let early = tokio::select! {
        biased;
        outcome = ticket.wait() => Some(outcome?),
        filled = body.fill(HELD_BODY) => match filled {
            Ok(()) => None,
            Err(error) => return Err(Reason::Broken(error.to_string())), // to nobody
        },
    };
    if let Some(pass) = early {
        return forward(client, pass, parts, body, true).await;
    }
    if let Some(every) = ticket.served.route.keepalive
        && streams::is_asked_for(&parts, &body)
    {
        return Ok(streams::keep_alive(
            client.clone(),
            ticket,
            parts,
            body,
            Duration::from_secs_f64(every),
        ));
    }
    let pass = ticket.wait().await?;
    forward(client, pass, parts, body, true).await
}

/// Answers for a server that is parked, or asks it on a connection of its own, without waking it.
async fn parked(client: &Client, served: &Served, mut parts: Parts, body: Incoming) -> Result<Response<Reply>, Reason> {
    client.seat.counts.quiet.add(1);
    if let Class::Quiet(Some(answer)) = served.paths.class(parts.uri.path()) {
        let body = (parts.method != Method::HEAD).then(|| Bytes::from(answer.body.clone()));
        let mut response = Response::new(Reply::Whole(body));
        *response.status_mut() = StatusCode::from_u16(answer.status).unwrap_or(StatusCode::OK);
        if let Ok(kind) = HeaderValue::from_str(&answer.content_type) {
            response.headers_mut().insert(CONTENT_TYPE, kind);
        }
        return Ok(response);
    }
    let Some(backend) = served.route.backend else {
        return Err(Reason::Away);
    };
    headers::towards_server(&mut parts, client.address, None, false);
    let request = Request::from_parts(parts, Outgoing::new(body));
    match timeout(QUIET, send_alone(backend, request)).await {
        Ok(Ok(response)) => Ok(towards_client(response, |body| Passing {
            body,
            lease: None,
            pass: None,
        })),
        Ok(Err(failure)) => Err(reason(failure)),
        Err(_) => Err(Reason::Silent(QUIET)),
    }
}

/// Sends a request to the open seat's server. `asked`: its body was asked for already.
pub async fn forward(
    client: &Client,
    pass: Pass,
    mut parts: Parts,
    mut body: Outgoing,
    asked: bool,
) -> Result<Response<Reply>, Reason> {
    let served = pass.served.clone();
    let Some(pool) = &served.pool else {
        return Err(Reason::Away);
    };
    let shared = served.route.h2c || headers::is_grpc(&parts);
    let expects = headers::expects(&parts);
    let upgrade = if shared { None } else { headers::upgrade(&parts) };
    let upgrading = upgrade
        .is_some()
        .then(|| parts.extensions.remove::<OnUpgrade>())
        .flatten();
    headers::towards_server(&mut parts, client.address, upgrade, shared);
    let mut wanted = None;
    if expects && !asked && !shared {
        let (sender, receiver) = oneshot::channel();
        body = body.gated(receiver);
        wanted = Some(sender);
    } else {
        parts.headers.remove(EXPECT);
    }
    let mut request = Request::from_parts(parts, body);
    if let Some(sender) = wanted {
        let sender = Mutex::new(Some(sender));
        hyper::ext::on_informational(&mut request, move |word| {
            if word.status() == StatusCode::CONTINUE {
                let sender = sender.lock().ok().and_then(|mut sender| sender.take());
                let _ = sender.map(|sender| sender.send(()));
            }
        });
    }
    let sent = if shared {
        pool.send_shared(request).await.map(|response| (response, None))
    } else {
        pool.send(request)
            .await
            .map(|(response, lease)| (response, Some(lease)))
    };
    let (mut response, lease) = sent.map_err(|failure| {
        client.seat.failed(matches!(failure, Failure::Broken(_)));
        reason(failure)
    })?;
    if response.status() == StatusCode::SWITCHING_PROTOCOLS {
        let Some(upgrading) = upgrading else {
            return Err(Reason::Broken(
                "it went over to a protocol that nobody asked for".to_owned(),
            ));
        };
        tunnel(client, pass, upgrading, hyper::upgrade::on(&mut response));
        let kept = response.headers().get(hyper::header::UPGRADE).cloned();
        let (mut parts, _) = response.into_parts();
        headers::strip(&mut parts.headers);
        parts
            .headers
            .insert(hyper::header::CONNECTION, HeaderValue::from_static("upgrade"));
        if let Some(kept) = kept {
            parts.headers.insert(hyper::header::UPGRADE, kept);
        }
        return Ok(Response::from_parts(parts, Reply::Whole(None)));
    }
    Ok(towards_client(response, |body| Passing {
        body,
        lease,
        pass: Some(pass),
    }))
}

fn towards_client(response: Response<Incoming>, passing: impl FnOnce(Incoming) -> Passing) -> Response<Reply> {
    let (mut parts, body) = response.into_parts();
    headers::strip(&mut parts.headers);
    parts.version = hyper::Version::HTTP_11; // the client's connection writes its own
    let mut passing = passing(body);
    if passing.body.is_end_stream() {
        passing.end();
    }
    Response::from_parts(parts, Reply::Passing(passing))
}

/// Carries bytes both ways from now on. The request is in flight until both sides have ended, or one is broken off.
fn tunnel(client: &Client, pass: Pass, ours: OnUpgrade, theirs: OnUpgrade) {
    let seat = &client.seat;
    let Some(place) = seat.connections.enter(usize::MAX) else {
        return;
    };
    seat.counts.upgraded.add(1);
    place.busy.fetch_add(1, Relaxed);
    seat.connections.spawn(place, async move {
        let _pass = pass;
        if let (Ok(ours), Ok(theirs)) = tokio::join!(ours, theirs) {
            let (mut ours, mut theirs) = (TokioIo::new(ours), TokioIo::new(theirs));
            let _ = tokio::io::copy_bidirectional(&mut ours, &mut theirs).await;
        }
    });
}

fn reason(failure: Failure) -> Reason {
    match failure {
        Failure::Unreached(why) => Reason::Unreached(why),
        Failure::Broken(why) => Reason::Broken(why),
    }
}
