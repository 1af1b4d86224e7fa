//! Bodies on their way through: a request's, of which a part may have been read while it was held, and a reply's, which
//! keeps its request counted as in flight until the last byte has gone. Nothing is gathered here; each frame goes on as it comes.

use std::collections::VecDeque;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use hyper::body::Incoming;
use tokio::sync::{mpsc, oneshot};
use tokio::time::Sleep;

use crate::pool::Lease;
use crate::seat::Pass;

pub type Fault = Box<dyn std::error::Error + Send + Sync>;

/// How long a server is waited for that was asked whether it wants the body, and says nothing.
const UNASKED: Duration = Duration::from_secs(1);

/// A request's body towards the server.
pub struct Outgoing {
    front: VecDeque<Bytes>,
    rest: Option<Incoming>,
    gate: Option<Gate>,
}

/// Keeps a body back until the server has asked for it: the client is asked in turn when the body is first read.
struct Gate {
    asked: Option<oneshot::Receiver<()>>,
    patience: Pin<Box<Sleep>>,
}

impl Outgoing {
    pub fn new(rest: Incoming) -> Self {
        Self {
            front: VecDeque::new(),
            rest: Some(rest),
            gate: None,
        }
    }

    pub fn gated(mut self, asked: oneshot::Receiver<()>) -> Self {
        self.gate = Some(Gate {
            asked: Some(asked),
            patience: Box::pin(tokio::time::sleep(UNASKED)),
        });
        self
    }

    /// Reads the body into memory up to `limit` bytes, and then no further: whoever sends more is made to wait. Ends when the
    /// body has, which may be never. Fails when the client has gone.
    pub async fn fill(&mut self, limit: usize) -> Result<(), Fault> {
        std::future::poll_fn(|context| self.poll_fill(context, limit)).await
    }

    fn poll_fill(&mut self, context: &mut Context<'_>, limit: usize) -> Poll<Result<(), Fault>> {
        while let Some(rest) = self.rest.as_mut() {
            if rest.is_end_stream() {
                break;
            }
            if self.front.iter().map(Bytes::len).sum::<usize>() >= limit {
                return Poll::Pending; // woken by the deadline or by the seat
            }
            match ready!(Pin::new(rest).poll_frame(context)) {
                Some(Ok(frame)) => match frame.into_data() {
                    Ok(data) => self.front.push_back(data),
                    Err(_) => break, // trailers of a request: no server of models reads any
                },
                Some(Err(error)) => return Poll::Ready(Err(error.into())),
                None => break,
            }
        }
        Poll::Ready(Ok(()))
    }

    /// What `fill` has read.
    pub fn filled(&self) -> Vec<u8> {
        self.front.iter().flatten().copied().collect()
    }
}

impl Body for Outgoing {
    type Data = Bytes;
    type Error = Fault;

    fn poll_frame(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Fault>>> {
        if let Some(gate) = self.gate.as_mut() {
            let word = gate.asked.as_mut().map(|asked| Pin::new(asked).poll(context));
            if matches!(word, Some(Poll::Ready(Err(_)))) {
                gate.asked = None; // it has answered already, and does not want the body
            }
            if !matches!(word, Some(Poll::Ready(Ok(())))) && gate.patience.as_mut().poll(context).is_pending() {
                return Poll::Pending;
            }
            self.gate = None;
        }
        if let Some(data) = self.front.pop_front() {
            return Poll::Ready(Some(Ok(Frame::data(data))));
        }
        match self.rest.as_mut() {
            Some(rest) => Pin::new(rest).poll_frame(context).map_err(Into::into),
            None => Poll::Ready(None),
        }
    }

    fn is_end_stream(&self) -> bool {
        self.front.is_empty() && self.rest.as_ref().is_none_or(Body::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        let front: u64 = self.front.iter().map(|data| data.len() as u64).sum();
        let mut hint = self
            .rest
            .as_ref()
            .map_or_else(|| SizeHint::with_exact(0), Body::size_hint);
        if let Some(upper) = hint.upper() {
            hint.set_upper(upper + front);
        }
        hint.set_lower(hint.lower() + front);
        hint
    }
}

/// A reply's body towards the client.
pub enum Reply {
    /// Of our own making.
    Whole(Option<Bytes>),
    /// The server's.
    Passing(Passing),
    /// Written by a task that holds a stream.
    Told(mpsc::Receiver<Result<Bytes, Fault>>),
}

/// The server's reply. The request counts as in flight, and its connection as used, until this ends.
pub struct Passing {
    pub body: Incoming,
    pub lease: Option<Lease>,
    pub pass: Option<Pass>,
}

impl Passing {
    fn poll(&mut self, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Fault>>> {
        let frame = ready!(Pin::new(&mut self.body).poll_frame(context));
        match &frame {
            None => self.end(),
            Some(Ok(_)) if self.body.is_end_stream() => self.end(),
            Some(Ok(_)) => {}
            Some(Err(_)) => self.lease = None,
        }
        Poll::Ready(frame.map(|frame| frame.map_err(Into::into)))
    }

    /// The reply has come whole, so that its connection may serve again.
    pub fn end(&mut self) {
        if let Some(lease) = self.lease.take() {
            lease.give_back();
        }
        self.pass = None;
    }
}

impl Body for Reply {
    type Data = Bytes;
    type Error = Fault;

    fn poll_frame(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Fault>>> {
        match &mut *self {
            Reply::Whole(bytes) => Poll::Ready(bytes.take().map(|bytes| Ok(Frame::data(bytes)))),
            Reply::Passing(passing) => passing.poll(context),
            Reply::Told(told) => told
                .poll_recv(context)
                .map(|each| each.map(|each| each.map(Frame::data))),
        }
    }

    fn is_end_stream(&self) -> bool {
        match self {
            Reply::Whole(bytes) => bytes.is_none(),
            Reply::Passing(passing) => passing.body.is_end_stream(),
            Reply::Told(_) => false,
        }
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Reply::Whole(bytes) => SizeHint::with_exact(bytes.as_ref().map_or(0, |bytes| bytes.len() as u64)),
            Reply::Passing(passing) => passing.body.size_hint(),
            Reply::Told(_) => SizeHint::default(),
        }
    }
}
