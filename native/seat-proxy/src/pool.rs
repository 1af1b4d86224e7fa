//! Connections to one server, for one route in one epoch: idle ones are used again by that route and by no other, so that
//! nothing that a server wrote for one seat can ever be read as another's answer.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use hyper::body::Incoming;
use hyper::client::conn::{http1, http2};
use hyper::{Request, Response};
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::net::TcpStream;
use tokio::time::timeout;

use crate::body::Outgoing;

const CONNECT: Duration = Duration::from_secs(2);
/// Shorter than any server keeps its side (gunicorn: 2 s): a connection that is closed while it is used breaks a request.
const IDLE: Duration = Duration::from_millis(1500);
const MOST_IDLE: usize = 64;
const HEADERS: u32 = 64 * 1024;

/// Why there is no answer.
#[derive(Debug)]
pub enum Failure {
    /// The server was not reached: it has seen nothing of the request.
    Unreached(String),
    /// It was, and may have done anything.
    Broken(String),
}

#[derive(Debug)]
pub struct Pool {
    backend: SocketAddr,
    idle: Mutex<Idle>,
    /// One connection carries all requests of HTTP/2.
    shared: tokio::sync::Mutex<Option<http2::SendRequest<Outgoing>>>,
}

#[derive(Debug, Default)]
struct Idle {
    closed: bool,
    senders: Vec<(Instant, http1::SendRequest<Outgoing>)>,
}

/// A connection of HTTP/1.1 while it carries a request. Dropped before its reply has come whole, it is closed.
pub struct Lease {
    pool: Arc<Pool>,
    sender: http1::SendRequest<Outgoing>,
}

impl Lease {
    pub fn give_back(mut self) {
        tokio::spawn(async move {
            if self.sender.ready().await.is_ok() {
                self.pool.put(self.sender);
            }
        });
    }
}

impl Pool {
    pub fn new(backend: SocketAddr) -> Arc<Self> {
        Arc::new(Self {
            backend,
            idle: Mutex::default(),
            shared: tokio::sync::Mutex::default(),
        })
    }

    /// Nothing of it is used again; requests in flight go on.
    pub fn close(&self) {
        let mut idle = self.idle();
        idle.closed = true;
        idle.senders.clear();
    }

    fn idle(&self) -> std::sync::MutexGuard<'_, Idle> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn put(&self, sender: http1::SendRequest<Outgoing>) {
        let mut idle = self.idle();
        let now = Instant::now();
        idle.senders
            .retain(|(since, sender)| now - *since < IDLE && !sender.is_closed());
        if !idle.closed && idle.senders.len() < MOST_IDLE {
            idle.senders.push((now, sender));
        }
    }

    fn take(&self) -> Option<http1::SendRequest<Outgoing>> {
        let mut idle = self.idle();
        while let Some((since, sender)) = idle.senders.pop() {
            if since.elapsed() < IDLE && sender.is_ready() {
                return Some(sender);
            }
        }
        None
    }

    /// Sends a request by HTTP/1.1, on a new connection if need be.
    pub async fn send(
        self: &Arc<Self>,
        mut request: Request<Outgoing>,
    ) -> Result<(Response<Incoming>, Lease), Failure> {
        loop {
            let (mut sender, used) = match self.take() {
                Some(sender) => (sender, true),
                None => (connect(self.backend).await?, false),
            };
            match sender.try_send_request(request).await {
                Ok(response) => {
                    return Ok((
                        response,
                        Lease {
                            pool: self.clone(),
                            sender,
                        },
                    ));
                }
                Err(mut error) => match error.take_message() {
                    // It was closed before a byte was sent.
                    Some(unsent) if used => request = unsent,
                    Some(_) => return Err(Failure::Unreached(text(&error.into_error()))),
                    None => return Err(Failure::Broken(text(&error.into_error()))),
                },
            }
        }
    }

    /// Sends a request by HTTP/2 with prior knowledge.
    pub async fn send_shared(&self, mut request: Request<Outgoing>) -> Result<Response<Incoming>, Failure> {
        loop {
            let (mut sender, used) = self.shared_sender().await?;
            match sender.try_send_request(request).await {
                Ok(response) => return Ok(response),
                Err(mut error) => match error.take_message() {
                    Some(unsent) if used => request = unsent,
                    Some(_) => return Err(Failure::Unreached(text(&error.into_error()))),
                    None => return Err(Failure::Broken(text(&error.into_error()))),
                },
            }
        }
    }

    async fn shared_sender(&self) -> Result<(http2::SendRequest<Outgoing>, bool), Failure> {
        let mut shared = self.shared.lock().await;
        if let Some(sender) = shared.as_mut()
            && sender.ready().await.is_ok()
        {
            return Ok((sender.clone(), true));
        }
        let stream = reach(self.backend).await?;
        let (sender, connection) = http2::Builder::new(TokioExecutor::new())
            .max_header_list_size(HEADERS)
            .handshake(TokioIo::new(stream))
            .await
            .map_err(|error| Failure::Unreached(text(&error)))?;
        tokio::spawn(connection);
        *shared = Some(sender.clone());
        Ok((sender, false))
    }
}

/// A request on a connection of its own.
pub async fn send_alone(backend: SocketAddr, request: Request<Outgoing>) -> Result<Response<Incoming>, Failure> {
    let mut sender = connect(backend).await?;
    sender
        .send_request(request)
        .await
        .map_err(|error| Failure::Broken(text(&error)))
}

async fn reach(backend: SocketAddr) -> Result<TcpStream, Failure> {
    let stream = match timeout(CONNECT, TcpStream::connect(backend)).await {
        Ok(Ok(stream)) => stream,
        Ok(Err(error)) => return Err(Failure::Unreached(error.to_string())),
        Err(_) => {
            return Err(Failure::Unreached(format!(
                "no connection within {} s",
                CONNECT.as_secs()
            )));
        }
    };
    stream
        .set_nodelay(true)
        .map_err(|error| Failure::Unreached(error.to_string()))?;
    Ok(stream)
}

async fn connect(backend: SocketAddr) -> Result<http1::SendRequest<Outgoing>, Failure> {
    let stream = reach(backend).await?;
    let (sender, connection) = http1::Builder::new()
        .handshake(TokioIo::new(stream))
        .await
        .map_err(|error| Failure::Unreached(text(&error)))?;
    tokio::spawn(connection.with_upgrades());
    Ok(sender)
}

/// An error with what caused it, for people.
fn text(error: &hyper::Error) -> String {
    match std::error::Error::source(error) {
        Some(source) => format!("{error}: {source}"),
        None => error.to_string(),
    }
}
