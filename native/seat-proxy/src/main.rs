//! The seat proxy: one process a node, that carries the requests of all its seats and outlives `berth node`.
//!
//! `seat-proxy --control SOCKET [--grace SECONDS]`. It serves nothing until the node says by the socket what to serve.

mod body;
mod connections;
mod control;
mod counts;
mod events;
mod forward;
mod headers;
mod listen;
mod paths;
mod pool;
mod refusals;
mod seat;
mod streams;
mod table;
mod wire;

use std::fs::File;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use tokio::signal::unix::{SignalKind, signal};

use crate::table::Table;

/// Kubernetes gives a pod 30 s before it kills it.
const GRACE: f64 = 25.0;

/// One carries some ten thousand requests a second; the rest of the node's cores are the pods'.
const THREADS: usize = 4;

struct Arguments {
    control: PathBuf,
    grace: Duration,
}

fn arguments() -> Result<Arguments, String> {
    let (mut control, mut grace) = (None, GRACE);
    let mut words = std::env::args_os().skip(1);
    while let Some(word) = words.next() {
        let value = words
            .next()
            .ok_or_else(|| format!("{} needs a value", word.display()))?;
        match word.to_str() {
            Some("--control") => control = Some(PathBuf::from(value)),
            Some("--grace") => {
                grace = value
                    .to_str()
                    .and_then(|value| value.parse().ok())
                    .ok_or("--grace is a number of seconds")?;
            }
            _ => return Err(format!("{} is unknown", word.display())),
        }
    }
    Ok(Arguments {
        control: control.ok_or("--control SOCKET is missing")?,
        grace: Duration::try_from_secs_f64(grace).map_err(|_| "--grace is a number of seconds")?,
    })
}

fn main() -> ExitCode {
    let arguments = match arguments() {
        Ok(arguments) => arguments,
        Err(why) => {
            eprintln!("seat-proxy: {why}. Usage: seat-proxy --control SOCKET [--grace SECONDS]");
            return ExitCode::from(2);
        }
    };
    match run(&arguments) {
        Ok(()) => ExitCode::SUCCESS,
        Err(why) => {
            eprintln!("seat-proxy: {why}");
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: &Arguments) -> Result<(), String> {
    let path = &arguments.control;
    let lock = path.with_extension("lock");
    let lock = File::create(&lock).map_err(|error| format!("{} cannot be written: {error}", lock.display()))?;
    if lock.try_lock().is_err() {
        return Err(format!(
            "{} is served by another proxy: end that one first",
            path.display()
        ));
    }
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(std::thread::available_parallelism().map_or(1, |cores| cores.get().min(THREADS)))
        .enable_all()
        .build()
        .map_err(|error| format!("no threads are to be had: {error}"))?;
    runtime.block_on(serve(arguments))
}

async fn serve(arguments: &Arguments) -> Result<(), String> {
    let path = &arguments.control;
    let failed = |error: std::io::Error| format!("{} cannot be served: {error}", path.display());
    let mut terminated = signal(SignalKind::terminate()).map_err(failed)?;
    let mut interrupted = signal(SignalKind::interrupt()).map_err(failed)?;
    let listener = control::bind(path).map_err(failed)?;
    let table = Arc::new(Table::default());
    tokio::select! {
        served = control::serve(listener, path, table.clone()) => return served.map_err(failed),
        _ = terminated.recv() => {}
        _ = interrupted.recv() => {}
    }
    let _ = std::fs::remove_file(path);
    let left = table.end(arguments.grace).await;
    if left > 0 {
        eprintln!("seat-proxy: {left} requests or connections were broken off at the end of the grace");
    }
    Ok(())
}
