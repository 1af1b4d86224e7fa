//! The socket by which the node says what to serve and is told what goes on. Nothing that comes by it ends the proxy: what
//! is no request is answered as such, and a line without end costs its sender the connection.

use std::io;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::{Map, Value, json};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::{Semaphore, mpsc};
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

use crate::events::watch;
use crate::table::Table;
use crate::wire::{LINE, Op, Refusal, VERSION};

/// Nodes at once; there is one, and its successor while it is replaced.
const CLIENTS: usize = 16;
/// Requests of one connection at once: beyond, its lines are not read.
const PENDING: usize = 256;
/// How long somebody may let us wait for reading what he asked for.
const PATIENCE: Duration = Duration::from_secs(10);

/// What every connection is answered from.
struct Control {
    table: Arc<Table>,
    started: Instant,
}

/// The socket, that nobody but its owner reaches from the moment on that it has its name.
pub fn bind(path: &Path) -> io::Result<UnixListener> {
    let scratch = path.with_extension(format!("{}.new", std::process::id()));
    let _ = std::fs::remove_file(&scratch);
    let listener = UnixListener::bind(&scratch)?;
    std::fs::set_permissions(&scratch, PermissionsExt::from_mode(0o600))?;
    std::fs::rename(&scratch, path)?;
    Ok(listener)
}

/// Serves the socket for ever.
pub async fn serve(listener: UnixListener, path: &Path, table: Arc<Table>) -> io::Result<()> {
    let owner = std::fs::metadata(path)?.uid();
    let control = Arc::new(Control {
        table,
        started: Instant::now(),
    });
    let places = Arc::new(Semaphore::new(CLIENTS));
    loop {
        let Ok((stream, _)) = listener.accept().await else {
            sleep(Duration::from_millis(20)).await;
            continue;
        };
        let ours = stream
            .peer_cred()
            .is_ok_and(|peer| peer.uid() == owner || peer.uid() == 0);
        let Ok(place) = places.clone().try_acquire_owned() else {
            continue;
        };
        if ours {
            let control = control.clone();
            tokio::spawn(async move {
                control.talk(stream).await;
                drop(place);
            });
        }
    }
}

impl Control {
    async fn talk(self: Arc<Self>, stream: UnixStream) {
        let (read, mut write) = stream.into_split();
        let (lines, mut written) = mpsc::channel::<String>(PENDING);
        let mut work = JoinSet::new();
        let writer = tokio::spawn(async move {
            while let Some(mut line) = written.recv().await {
                line.push('\n');
                if !timeout(PATIENCE, write.write_all(line.as_bytes()))
                    .await
                    .is_ok_and(|sent| sent.is_ok())
                {
                    return;
                }
            }
        });
        let mut reader = BufReader::new(read);
        let mut line = Vec::new();
        loop {
            line.clear();
            let mut bounded = (&mut reader).take(LINE as u64 + 1);
            let taken = tokio::select! {
                taken = bounded.read_until(b'\n', &mut line) => taken,
                () = lines.closed() => break,
            };
            if taken.is_err() || line.is_empty() {
                break;
            }
            if line.pop_if(|last| *last == b'\n').is_none() && line.len() > LINE {
                let refusal = Refusal::new("too_long", format!("a line has at most {LINE} bytes"));
                let _ = lines.send(answer(&Value::Null, Err(refusal))).await;
                break;
            }
            while work.try_join_next().is_some() {}
            if work.len() >= PENDING {
                work.join_next().await;
            }
            self.clone().take(&line, &lines, &mut work).await;
        }
        work.shutdown().await;
        drop(lines);
        let _ = writer.await;
    }

    /// Does what a line asks for. What takes its time goes beside the others; the rest is done in the order of the lines.
    async fn take(self: Arc<Self>, line: &[u8], lines: &mpsc::Sender<String>, work: &mut JoinSet<()>) {
        let (id, op) = read(line);
        let lines = lines.clone();
        match op {
            Ok(Op::Watch { interval }) => {
                let outcome = match Duration::try_from_secs_f64(interval) {
                    Ok(interval) if interval.as_secs() <= 60 => {
                        work.spawn(watch(self.table.clone(), interval, lines.clone()));
                        Ok(Map::new())
                    }
                    _ => Err(Refusal::new(
                        "invalid",
                        format!("an interval is 0 to 60 seconds, and not {interval}"),
                    )),
                };
                let _ = lines.send(answer(&id, outcome)).await;
            }
            Ok(op @ Op::Drain { .. }) => {
                work.spawn(async move {
                    let outcome = self.execute(op).await;
                    let _ = lines.send(answer(&id, outcome)).await;
                });
            }
            Ok(op) => {
                let outcome = self.execute(op).await;
                let _ = lines.send(answer(&id, outcome)).await;
            }
            Err(refusal) => {
                let _ = lines.send(answer(&id, Err(refusal))).await;
            }
        }
    }

    async fn execute(&self, op: Op) -> Result<Map<String, Value>, Refusal> {
        let said = match op {
            Op::Hello {} => json!({
                "version": env!("CARGO_PKG_VERSION"),
                "pid": std::process::id(),
                "up": self.started.elapsed().as_secs_f64(),
            }),
            Op::Set { route } => {
                self.table.set(*route).await?;
                json!({})
            }
            Op::Remove { seat, epoch } => {
                self.table.remove(&seat, epoch).await?;
                json!({})
            }
            Op::Drain {
                seat,
                epoch,
                seconds,
                cut,
            } => {
                let drained = self.table.drain(&seat, epoch, seconds, cut).await?;
                json!({"left": drained.left, "cut": drained.cut})
            }
            Op::State {} => json!({"seats": self.table.state()}),
            Op::Metrics {} => json!({"seats": self.table.metrics()}),
            Op::Watch { .. } => json!({}),
        };
        match said {
            Value::Object(said) => Ok(said),
            _ => Ok(Map::new()),
        }
    }
}

/// A line's number and what it asks for.
fn read(line: &[u8]) -> (Value, Result<Op, Refusal>) {
    let malformed = |why: String| Refusal::new("malformed", format!("a line is no request: {why:.300}"));
    let mut fields: Map<String, Value> = match serde_json::from_slice(line) {
        Ok(fields) => fields,
        Err(error) => return (Value::Null, Err(malformed(error.to_string()))),
    };
    let id = fields.remove("id").filter(Value::is_u64).unwrap_or(Value::Null);
    let version = fields.remove("v");
    if version.as_ref().and_then(Value::as_u64) != Some(VERSION) {
        let message = format!(
            "this proxy speaks version {VERSION}, and was spoken to in {:.40}",
            version.unwrap_or_default().to_string()
        );
        return (id, Err(Refusal::new("version", message)));
    }
    let op = serde_json::from_value(Value::Object(fields)).map_err(|error| malformed(error.to_string()));
    (id, op)
}

fn answer(id: &Value, outcome: Result<Map<String, Value>, Refusal>) -> String {
    let mut said = match outcome {
        Ok(mut said) => {
            said.insert("ok".to_owned(), Value::Bool(true));
            said
        }
        Err(refusal) => {
            let mut said = Map::new();
            said.insert("ok".to_owned(), Value::Bool(false));
            said.insert("code".to_owned(), refusal.code.into());
            said.insert("message".to_owned(), refusal.message.into());
            said
        }
    };
    said.insert("v".to_owned(), VERSION.into());
    said.insert("id".to_owned(), id.clone());
    Value::Object(said).to_string()
}
