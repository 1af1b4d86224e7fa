//! The port of one seat: takes connections, finds out whether they speak HTTP/1.1 or HTTP/2, and serves them.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use hyper::server::conn::{http1, http2};
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use tokio::io::AsyncWriteExt;
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout_at};

use crate::forward::{Client, serve};
use crate::refusals::Reason;
use crate::seat::Seat;

const BACKLOG: u32 = 4096;
/// Bytes of a request's head. Twice as much is read ahead at most.
const HEAD: usize = 64 * 1024;
/// How long a connection may be without a request, and how long a head may take.
const IDLE: Duration = Duration::from_secs(75);
const STREAMS: u32 = 256;
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

pub fn bind(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = if address.is_ipv4() {
        TcpSocket::new_v4()?
    } else {
        TcpSocket::new_v6()?
    };
    socket.set_reuseaddr(true)?;
    socket.bind(address)?;
    socket.listen(BACKLOG)
}

/// Takes connections until `ending` says so; those taken end after the requests that they carry.
pub async fn accept(listener: TcpListener, seat: Arc<Seat>, ending: watch::Receiver<bool>) {
    let mut over = ending.clone();
    loop {
        let taken = tokio::select! {
            taken = listener.accept() => taken,
            _ = over.wait_for(|over| *over) => return,
        };
        match taken {
            Ok((stream, address)) => take(stream, address, &seat, ending.clone()),
            // None is to be had (descriptors, memory): what is there goes on, and those who come wait in the backlog.
            Err(_) => sleep(Duration::from_millis(20)).await,
        }
    }
}

fn take(mut stream: TcpStream, address: SocketAddr, seat: &Arc<Seat>, ending: watch::Receiver<bool>) {
    let served = seat.served();
    let Some(place) = seat.connections.enter(served.route.connections) else {
        seat.counts.refused_connections.add(1);
        tokio::spawn(async move {
            let _ = stream.write_all(&Reason::raw(&served.route)).await;
            let _ = stream.shutdown().await;
        });
        return;
    };
    let client = Client {
        seat: seat.clone(),
        address: address.ip(),
        busy: place.busy.clone(),
    };
    seat.connections.spawn(place, async move {
        if stream.set_nodelay(true).is_ok() {
            carry(stream, client, ending).await;
        }
    });
}

async fn carry(stream: TcpStream, client: Client, mut ending: watch::Receiver<bool>) {
    let deadline = Instant::now() + IDLE;
    let speaks = tokio::select! {
        speaks = timeout_at(deadline, speaks_http2(&stream)) => speaks,
        _ = ending.wait_for(|ending| *ending) => return,
    };
    let Ok(Ok(newer)) = speaks else { return };
    let service = service_fn(move |request| serve(client.clone(), request));
    let stream = TokioIo::new(stream);
    if newer {
        let connection = http2::Builder::new(TokioExecutor::new())
            .timer(TokioTimer::new())
            .max_concurrent_streams(STREAMS)
            .max_header_list_size(HEAD as u32)
            .keep_alive_interval(Some(IDLE))
            .serve_connection(stream, service);
        tokio::pin!(connection);
        tokio::select! {
            _ = &mut connection => return,
            _ = ending.wait_for(|ending| *ending) => connection.as_mut().graceful_shutdown(),
        }
        let _ = connection.await;
    } else {
        let connection = http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(IDLE)
            .max_header_size(HEAD)
            .max_buf_size(2 * HEAD)
            .serve_connection(stream, service)
            .with_upgrades();
        tokio::pin!(connection);
        tokio::select! {
            _ = &mut connection => return,
            _ = ending.wait_for(|ending| *ending) => connection.as_mut().graceful_shutdown(),
        }
        let _ = connection.await;
    }
}

/// Looks at the first bytes and leaves them there. Fails where none come.
async fn speaks_http2(stream: &TcpStream) -> io::Result<bool> {
    let mut seen = [0; PREFACE.len()];
    loop {
        let count = stream.peek(&mut seen).await?;
        if count == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        if count == PREFACE.len() || seen[..count] != PREFACE[..count] {
            return Ok(seen == PREFACE);
        }
        sleep(Duration::from_millis(5)).await; // a part of it: the rest is on its way
    }
}
