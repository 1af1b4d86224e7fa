//! What the node and the proxy say to each other over the control socket: one JSON object a line, in version 1.
//!
//! A request is `{"v": 1, "id": N, "op": …}`, its answer `{"v": 1, "id": N, "ok": true, …}` or
//! `{"v": 1, "id": N, "ok": false, "code": …, "message": …}`. Unknown fields are refused: half a route would be served else.

use std::net::SocketAddr;

use serde::{Deserialize, Serialize};

use crate::paths::Paths;

pub const VERSION: u64 = 1;
/// Bytes of one line, in either direction of a request.
pub const LINE: usize = 256 * 1024;

const MOST_SECONDS: f64 = 86_400.0;
const MOST_PATHS: usize = 256;
const MOST_QUEUE: usize = 100_000;
const MOST_NAME: usize = 128;
const MOST_ANSWER: usize = 64 * 1024;

/// What the proxy does with a seat's requests.
#[derive(Clone, Copy, Debug, Deserialize, Serialize, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
pub enum State {
    /// Forwarded.
    Open,
    /// Kept until the seat is open, or until their deadline.
    Held,
    /// Refused with 503.
    Away,
}

/// What a quiet path is answered with while the seat is not open.
#[derive(Clone, Debug, Deserialize, Serialize, PartialEq)]
#[serde(deny_unknown_fields)]
pub struct Answer {
    pub status: u16,
    pub content_type: String,
    pub body: String,
}

/// A path that neither wakes the seat nor waits for it. Without an answer it is passed on to the parked server.
#[derive(Clone, Debug, Deserialize, Serialize, PartialEq)]
#[serde(deny_unknown_fields)]
pub struct Quiet {
    pub path: String,
    pub answer: Option<Answer>,
}

/// Everything the proxy knows of a seat, as the node said it. Times are in seconds.
#[derive(Clone, Debug, Deserialize, Serialize, PartialEq)]
#[serde(deny_unknown_fields)]
pub struct Route {
    pub seat: String,
    /// Of the node's right to speak for the seat: a lower one than before is refused.
    pub epoch: u64,
    pub listen: SocketAddr,
    pub backend: Option<SocketAddr>,
    /// Whether the server speaks HTTP/2 (prior knowledge) for everything; for gRPC it always does.
    pub h2c: bool,
    pub state: State,
    pub retry_after: f64,
    /// Requests that may be held at once.
    pub queue: usize,
    /// How long a request is held.
    pub deadline: f64,
    /// Client connections at once.
    pub connections: usize,
    pub quiet: Vec<Quiet>,
    pub blocked: Vec<String>,
    /// Between the comments that keep a held stream alive; none: a held stream gets no byte.
    pub keepalive: Option<f64>,
}

impl Route {
    /// Refuses what cannot be served, with a sentence.
    pub fn check(&self) -> Result<Paths, String> {
        let name = &self.seat;
        if name.is_empty()
            || name.len() > MOST_NAME
            || !name.bytes().all(|b| b.is_ascii_alphanumeric() || b"-._".contains(&b))
        {
            return Err(format!(
                "a seat's name has 1 to {MOST_NAME} letters, digits, dashes, dots and underscores"
            ));
        }
        let seconds = |what: &str, value: f64, least: f64| {
            if value.is_finite() && value >= least && value <= MOST_SECONDS {
                return Ok(());
            }
            Err(format!(
                "{what} of seat {name} is {value}, and must be {least} to {MOST_SECONDS} seconds"
            ))
        };
        seconds("retry_after", self.retry_after, 0.0)?;
        seconds("deadline", self.deadline, 0.0)?;
        if let Some(every) = self.keepalive {
            seconds("keepalive", every, 0.01)?;
        }
        if self.queue > MOST_QUEUE || self.connections == 0 || self.connections > MOST_QUEUE {
            return Err(format!(
                "queue and connections of seat {name} are at most {MOST_QUEUE}, and connections at least 1"
            ));
        }
        if self.listen.port() == 0 || self.backend.is_some_and(|backend| backend.port() == 0) {
            return Err(format!(
                "an address of seat {name} has port 0: ports are chosen by the node"
            ));
        }
        if self.state == State::Open && self.backend.is_none() {
            return Err(format!("seat {name} is to be open and has no backend"));
        }
        if self.backend == Some(self.listen) {
            return Err(format!(
                "seat {name} would be forwarded to itself, for its backend is its own address"
            ));
        }
        if self.quiet.len() > MOST_PATHS || self.blocked.len() > MOST_PATHS {
            return Err(format!("seat {name} has more than {MOST_PATHS} quiet or blocked paths"));
        }
        for answer in self.quiet.iter().filter_map(|quiet| quiet.answer.as_ref()) {
            let status = hyper::StatusCode::from_u16(answer.status);
            if !(200..600).contains(&answer.status)
                || status.is_err()
                || hyper::header::HeaderValue::from_str(&answer.content_type).is_err()
                || answer.body.len() > MOST_ANSWER
            {
                return Err(format!(
                    "an answer of seat {name} has no final status, no content type or more than {MOST_ANSWER} bytes"
                ));
            }
        }
        Paths::new(&self.quiet, &self.blocked).map_err(|why| format!("{why} (seat {name})"))
    }
}

/// A request of the node.
#[derive(Debug, Deserialize)]
#[serde(tag = "op", rename_all = "snake_case", deny_unknown_fields)]
pub enum Op {
    /// Which proxy this is.
    Hello {},
    /// Serves a seat so from now on.
    Set { route: Box<Route> },
    /// Serves a seat no more: its requests in flight go on, those held are refused.
    Remove { seat: String, epoch: u64 },
    /// Forwards no new request; answered when none is in flight, or after `seconds` with the number left. With `cut`
    /// those left are broken off then.
    Drain {
        seat: String,
        epoch: u64,
        seconds: f64,
        cut: bool,
    },
    /// All seats, with routes and traffic.
    State {},
    /// Counters and the histogram of hold times.
    Metrics {},
    /// Sends events on this connection from now on: traffic of all seats first, then of those that change, at most once
    /// in `interval` seconds, and at once where a first request is held.
    Watch { interval: f64 },
}

/// How much is going on at a seat.
#[derive(Clone, Debug, Serialize)]
pub struct Traffic {
    pub seat: String,
    pub epoch: u64,
    pub state: State,
    pub draining: bool,
    pub held: usize,
    /// How long the oldest held request has been waiting, in seconds.
    pub oldest: Option<f64>,
    pub in_flight: usize,
    /// Seconds since a forwarded request ended last.
    pub ended: Option<f64>,
    /// Requests that the open seat's server did not answer, since the proxy began.
    pub failed: u64,
}

/// Why a request of the node was not done.
#[derive(Debug)]
pub struct Refusal {
    pub code: &'static str,
    pub message: String,
}

impl Refusal {
    pub fn new(code: &'static str, message: impl Into<String>) -> Self {
        Self {
            code,
            message: message.into(),
        }
    }
}
