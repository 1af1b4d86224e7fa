//! What clients are told that get no answer of a server: a sentence in the shape of OpenAI's errors, and when to come again.

use std::time::Duration;

use bytes::Bytes;
use hyper::header::{CONTENT_TYPE, HeaderValue, RETRY_AFTER};
use hyper::{Response, StatusCode};
use serde_json::{Value, json};

use crate::body::Reply;
use crate::wire::Route;

#[derive(Clone, Debug)]
pub enum Reason {
    Away,
    Queue(usize),
    Deadline(Duration),
    Removed,
    Ending,
    Unreached(String),
    Broken(String),
    Silent(Duration),
    Blocked(String),
    Connect,
    /// A held stream's server answered with this instead of a stream.
    NoStream(StatusCode, String),
}

impl Reason {
    fn status(&self) -> StatusCode {
        match self {
            Reason::Broken(_) => StatusCode::BAD_GATEWAY,
            Reason::Silent(_) => StatusCode::GATEWAY_TIMEOUT,
            Reason::Blocked(_) => StatusCode::FORBIDDEN,
            Reason::Connect => StatusCode::METHOD_NOT_ALLOWED,
            Reason::NoStream(status, _) => *status,
            _ => StatusCode::SERVICE_UNAVAILABLE,
        }
    }

    fn code(&self) -> &'static str {
        match self {
            Reason::Away => "seat_away",
            Reason::Queue(_) => "seat_queue_full",
            Reason::Deadline(_) => "seat_wait_timeout",
            Reason::Removed => "seat_removed",
            Reason::Ending => "proxy_ending",
            Reason::Unreached(_) => "server_unreachable",
            Reason::Broken(_) => "server_broke_off",
            Reason::Silent(_) => "server_silent",
            Reason::Blocked(_) => "path_blocked",
            Reason::Connect => "method_not_allowed",
            Reason::NoStream(..) => "server_refused",
        }
    }

    fn sentence(&self, seat: &str, again: u64) -> String {
        let retry = format!("try again in {again} s");
        match self {
            Reason::Away => format!("The model server of seat {seat} is not available now: {retry}."),
            Reason::Queue(most) => {
                format!("The model server of seat {seat} is parked, and {most} requests wait for it already: {retry}.")
            }
            Reason::Deadline(waited) => {
                let waited = waited.as_secs_f64();
                format!("The model server of seat {seat} is parked, and was not woken within {waited} s: {retry}.")
            }
            Reason::Removed => format!("Seat {seat} is served here no more: {retry}."),
            Reason::Ending => format!("The proxy of seat {seat} is being replaced: {retry}."),
            Reason::Unreached(why) => {
                format!(
                    "The model server of seat {seat} cannot be reached ({why}), and has not seen the request: {retry}."
                )
            }
            Reason::Broken(why) => format!(
                "The model server of seat {seat} broke off before it answered ({why}); whether it did anything is not known."
            ),
            Reason::Silent(waited) => {
                format!(
                    "The parked model server of seat {seat} did not answer within {} s.",
                    waited.as_secs()
                )
            }
            Reason::Blocked(path) => format!("The path {path} controls the engine, and is not open to clients."),
            Reason::Connect => "CONNECT is not served here.".to_owned(),
            Reason::NoStream(status, said) => {
                format!(
                    "The model server of seat {seat} answered with status {} and no stream: {said}",
                    status.as_u16()
                )
            }
        }
    }

    fn document(&self, route: &Route) -> Value {
        let kind = if self.status().is_client_error() {
            "invalid_request_error"
        } else {
            "server_error"
        };
        let message = self.sentence(&route.seat, again(route));
        json!({"error": {"message": message, "type": kind, "param": null, "code": self.code()}})
    }

    /// For a client that has got nothing yet.
    pub fn response(&self, route: &Route) -> Response<Reply> {
        let body = Bytes::from(self.document(route).to_string());
        let mut response = Response::new(Reply::Whole(Some(body)));
        *response.status_mut() = self.status();
        let headers = response.headers_mut();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        if self.status() == StatusCode::SERVICE_UNAVAILABLE {
            headers.insert(RETRY_AFTER, HeaderValue::from(again(route)));
        }
        response
    }

    /// For a client of gRPC: status 14, UNAVAILABLE, or 7, PERMISSION_DENIED, without a message
    /// (https://github.com/grpc/grpc/blob/master/doc/PROTOCOL-HTTP2.md, Trailers-Only).
    pub fn grpc(&self, route: &Route) -> Response<Reply> {
        let status = if matches!(self, Reason::Blocked(_)) { "7" } else { "14" };
        let mut message = String::new();
        for byte in self.sentence(&route.seat, again(route)).bytes() {
            match byte {
                b' '..=b'~' if byte != b'%' => message.push(char::from(byte)),
                _ => message.push_str(&format!("%{byte:02X}")),
            }
        }
        let mut response = Response::new(Reply::Whole(None));
        let headers = response.headers_mut();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/grpc"));
        headers.insert("grpc-status", HeaderValue::from_static(status));
        if let Ok(message) = HeaderValue::from_str(&message) {
            headers.insert("grpc-message", message);
        }
        response
    }

    /// For a client whose stream has begun.
    pub fn event(&self, route: &Route) -> Bytes {
        Bytes::from(format!("data: {}\n\ndata: [DONE]\n\n", self.document(route)))
    }

    /// For a connection of which nothing has been read.
    pub fn raw(route: &Route) -> Vec<u8> {
        let again = again(route);
        let (seat, most) = (&route.seat, route.connections);
        let message = format!("Seat {seat} has {most} connections, and takes no more: try again in {again} s.");
        let error = json!({"message": message, "type": "server_error", "param": null, "code": "seat_connections_full"});
        let body = json!({"error": error}).to_string();
        let length = body.len();
        format!(
            "HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: {again}\r\n\
             Content-Length: {length}\r\nConnection: close\r\n\r\n{body}"
        )
        .into_bytes()
    }
}

/// Whole seconds, rounded up; a client that came back at once would only be refused again.
fn again(route: &Route) -> u64 {
    (route.retry_after.ceil() as u64).max(1)
}
