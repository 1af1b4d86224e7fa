//! All seats of the node with their ports, as the node has said. What was said last stays when the node is away.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::time::{Instant, sleep};

use crate::events::Hub;
use crate::listen::{accept, bind};
use crate::refusals::Reason;
use crate::seat::{Drained, Seat};
use crate::wire::{Refusal, Route};

#[derive(Debug, Default)]
pub struct Table {
    pub hub: Arc<Hub>,
    entries: Mutex<HashMap<String, Entry>>,
    /// The epochs of seats that are served no more: an older word does not bring them back.
    removed: Mutex<HashMap<String, u64>>,
    /// Routes change one after the other.
    turn: tokio::sync::Mutex<bool>,
}

#[derive(Debug)]
struct Entry {
    seat: Arc<Seat>,
    port: Port,
}

/// A port that is listened on, until this says that it is over.
#[derive(Debug)]
struct Port {
    address: SocketAddr,
    over: watch::Sender<bool>,
}

impl Port {
    fn open(listener: TcpListener, address: SocketAddr, seat: &Arc<Seat>) -> Self {
        let (over, ending) = watch::channel(false);
        tokio::spawn(accept(listener, seat.clone(), ending));
        Self { address, over }
    }
}

impl Table {
    fn entries(&self) -> MutexGuard<'_, HashMap<String, Entry>> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn removed(&self) -> MutexGuard<'_, HashMap<String, u64>> {
        self.removed.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn seats(&self) -> Vec<Arc<Seat>> {
        self.entries().values().map(|entry| entry.seat.clone()).collect()
    }

    fn seat(&self, name: &str) -> Result<Arc<Seat>, Refusal> {
        let found = self.entries().get(name).map(|entry| entry.seat.clone());
        found.ok_or_else(|| Refusal::new("unknown", format!("there is no seat {name:.128} here")))
    }

    /// Serves a seat by this route from now on.
    pub async fn set(&self, route: Route) -> Result<(), Refusal> {
        let paths = route.check().map_err(|why| Refusal::new("invalid", why))?;
        let ended = self.turn.lock().await;
        if *ended {
            return Err(Refusal::new("ending", "this proxy is ending: speak to the next one"));
        }
        let (name, address) = (route.seat.clone(), route.listen);
        if let Some(&epoch) = self.removed().get(&name)
            && route.epoch < epoch
        {
            let message = format!(
                "seat {name} was removed in epoch {epoch}, and was spoken to in epoch {}",
                route.epoch
            );
            return Err(Refusal::new("stale", message));
        }
        let listen = || {
            bind(address).map_err(|error| {
                let message = format!("seat {name} cannot be served on {address}: {error}; give it another address");
                Refusal::new("address", message)
            })
        };
        let known = self
            .entries()
            .get(&name)
            .map(|entry| (entry.seat.clone(), entry.port.address));
        match known {
            None => {
                let listener = listen()?;
                let seat = Seat::new(route, paths, self.hub.clone());
                let port = Port::open(listener, address, &seat);
                self.entries().insert(name.clone(), Entry { seat, port });
                self.removed().remove(&name);
                self.hub.changed();
            }
            Some((seat, before)) if before == address => seat.set(route, paths)?,
            Some((seat, _)) => {
                seat.check(route.epoch)?;
                let listener = listen()?;
                seat.set(route, paths)?;
                let port = Port::open(listener, address, &seat);
                if let Some(entry) = self.entries().get_mut(&name) {
                    let before = std::mem::replace(&mut entry.port, port);
                    before.over.send_replace(true);
                }
            }
        }
        Ok(())
    }

    /// Serves a seat no more.
    pub async fn remove(&self, name: &str, epoch: u64) -> Result<(), Refusal> {
        let _turn = self.turn.lock().await;
        let seat = self.seat(name)?;
        seat.check(epoch)?;
        self.removed().insert(name.to_owned(), epoch);
        let entry = self.entries().remove(name);
        seat.close(&Reason::Removed);
        if let Some(entry) = entry {
            entry.port.over.send_replace(true);
        }
        self.hub.changed();
        Ok(())
    }

    pub async fn drain(&self, name: &str, epoch: u64, seconds: f64, cut: bool) -> Result<Drained, Refusal> {
        let patience = Duration::try_from_secs_f64(seconds)
            .ok()
            .filter(|patience| patience.as_secs() <= 86_400)
            .ok_or_else(|| {
                Refusal::new(
                    "invalid",
                    format!("a drain cannot wait for {seconds} seconds: at most a day"),
                )
            })?;
        self.seat(name)?.drain(epoch, patience, cut).await
    }

    pub fn state(&self) -> Value {
        let seats = self.seats();
        let shown = seats.iter().filter_map(|seat| {
            let (_, traffic) = seat.traffic(0)?;
            Some(json!({"route": seat.served().route, "traffic": traffic}))
        });
        shown.collect()
    }

    pub fn metrics(&self) -> Value {
        let seats = self.seats();
        Value::Object(
            seats
                .iter()
                .map(|seat| (seat.name.clone(), seat.counts.shown()))
                .collect(),
        )
    }

    /// Takes nothing more, lets what is in flight end within the grace, and returns how much was left.
    pub async fn end(&self, grace: Duration) -> usize {
        *self.turn.lock().await = true;
        let seats = self.seats();
        for entry in self.entries().values() {
            entry.port.over.send_replace(true);
        }
        for seat in &seats {
            seat.close(&Reason::Ending);
        }
        let deadline = Instant::now() + grace;
        loop {
            let left: usize = seats
                .iter()
                .map(|seat| seat.in_flight() + seat.connections.count())
                .sum();
            if left == 0 || Instant::now() >= deadline {
                return left;
            }
            sleep(Duration::from_millis(10)).await;
        }
    }
}
