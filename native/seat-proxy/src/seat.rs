//! One seat: decides of each request whether it is forwarded, waits or is refused, and counts those in flight. All of it
//! under one lock, so that after a drain has begun no request can slip through.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::{Notify, oneshot};
use tokio::time::{sleep_until, timeout_at};

use crate::connections::Connections;
use crate::counts::Counts;
use crate::events::Hub;
use crate::paths::Paths;
use crate::pool::Pool;
use crate::refusals::Reason;
use crate::wire::{Refusal, Route, State, Traffic};

/// How long a drain waits for what it broke off to be gone.
const CUTTING: Duration = Duration::from_secs(2);

/// A route, and what serves it.
#[derive(Debug)]
pub struct Served {
    pub route: Route,
    pub paths: Paths,
    pub pool: Option<Arc<Pool>>,
}

#[derive(Debug)]
pub struct Seat {
    pub name: String,
    pub counts: Counts,
    pub connections: Arc<Connections>,
    inner: Mutex<Inner>,
    idle: Notify,
    hub: Arc<Hub>,
}

#[derive(Debug)]
struct Inner {
    served: Arc<Served>,
    /// How often the route was set: a drain that began before is overruled.
    settings: u64,
    draining: bool,
    /// Nobody gets in any more: the seat was removed, or the proxy ends.
    closed: Option<Reason>,
    in_flight: usize,
    waiting: BTreeMap<u64, Waiter>,
    tickets: u64,
    ended: Option<Instant>,
    version: u64,
}

/// What a held request is told.
type Outcome = Result<Pass, Reason>;

#[derive(Debug)]
struct Waiter {
    since: Instant,
    busy: Arc<AtomicUsize>,
    outcome: oneshot::Sender<Outcome>,
}

/// What becomes of a request.
pub enum Verdict {
    Forward(Pass),
    Wait(Ticket),
    /// It is for a quiet path, and the seat is not open.
    Parked(Arc<Served>),
    Refuse(Reason),
}

/// Leave to forward one request by one route. While it exists the request is in flight.
#[derive(Debug)]
pub struct Pass {
    pub served: Arc<Served>,
    seat: Arc<Seat>,
    busy: Arc<AtomicUsize>,
}

impl Pass {
    fn new(seat: &Arc<Seat>, inner: &mut Inner, busy: &Arc<AtomicUsize>) -> Self {
        inner.in_flight += 1;
        busy.fetch_add(1, Relaxed);
        seat.counts.forwarded.add(1);
        Self {
            served: inner.served.clone(),
            seat: seat.clone(),
            busy: busy.clone(),
        }
    }
}

impl Drop for Pass {
    fn drop(&mut self) {
        self.busy.fetch_sub(1, Relaxed);
        let mut inner = self.seat.inner();
        inner.in_flight -= 1;
        inner.ended = Some(Instant::now());
        inner.version += 1;
        let none_left = inner.in_flight == 0;
        drop(inner);
        if none_left {
            self.seat.idle.notify_waiters();
        }
        self.seat.hub.changed();
    }
}

/// A held request's place in the queue, given up when dropped.
pub struct Ticket {
    pub served: Arc<Served>,
    seat: Arc<Seat>,
    number: u64,
    since: Instant,
    outcome: oneshot::Receiver<Outcome>,
}

impl Ticket {
    /// Waits until the seat lets it in, or until its deadline.
    pub async fn wait(&mut self) -> Outcome {
        let patience = Duration::from_secs_f64(self.served.route.deadline);
        let deadline = tokio::time::Instant::from_std(self.since + patience);
        let outcome = tokio::select! {
            biased;
            outcome = &mut self.outcome => outcome,
            () = sleep_until(deadline) => {
                if self.seat.inner().waiting.remove(&self.number).is_some() {
                    self.seat.counts.refused_deadline.add(1);
                    self.seat.touched();
                    return Err(Reason::Deadline(patience));
                }
                (&mut self.outcome).await // it was let in at that very moment
            }
        };
        match outcome {
            Ok(Ok(pass)) => {
                self.seat.counts.released.add(1);
                self.seat.counts.held_seconds.add(self.since.elapsed());
                Ok(pass)
            }
            Ok(Err(reason)) => {
                self.seat.counts.refused_away.add(1);
                Err(reason)
            }
            Err(_) => Err(Reason::Away),
        }
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        let waited = self.seat.inner().waiting.remove(&self.number).is_some();
        if waited {
            self.seat.counts.left.add(1);
            self.seat.touched();
        }
    }
}

/// How a drain ended.
#[derive(Debug)]
pub struct Drained {
    pub left: usize,
    pub cut: usize,
}

impl Inner {
    fn gate(&self) -> State {
        match self.served.route.state {
            State::Open if self.draining => State::Held,
            state => state,
        }
    }
}

impl Seat {
    pub fn new(route: Route, paths: Paths, hub: Arc<Hub>) -> Arc<Self> {
        let pool = route.backend.map(Pool::new);
        Arc::new(Self {
            name: route.seat.clone(),
            counts: Counts::default(),
            connections: Arc::default(),
            inner: Mutex::new(Inner {
                served: Arc::new(Served { route, paths, pool }),
                settings: 0,
                draining: false,
                closed: None,
                in_flight: 0,
                waiting: BTreeMap::new(),
                tickets: 0,
                ended: None,
                version: 1,
            }),
            idle: Notify::new(),
            hub,
        })
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn touched(&self) {
        self.inner().version += 1;
        self.hub.changed();
    }

    pub fn served(&self) -> Arc<Served> {
        self.inner().served.clone()
    }

    /// Decides about a request that came on a connection with `busy` others.
    pub fn admit(self: &Arc<Self>, busy: &Arc<AtomicUsize>, quiet: bool) -> Verdict {
        let mut inner = self.inner();
        let gate = inner.gate();
        if let Some(reason) = &inner.closed {
            let reason = reason.clone();
            drop(inner);
            self.counts.refused_away.add(1);
            return Verdict::Refuse(reason);
        }
        if gate == State::Open {
            inner.version += 1;
            let pass = Pass::new(self, &mut inner, busy);
            drop(inner);
            self.hub.changed();
            return Verdict::Forward(pass);
        }
        let served = inner.served.clone();
        if quiet {
            return Verdict::Parked(served);
        }
        if gate == State::Away {
            drop(inner);
            self.counts.refused_away.add(1);
            return Verdict::Refuse(Reason::Away);
        }
        if inner.waiting.len() >= served.route.queue {
            drop(inner);
            self.counts.refused_queue.add(1);
            return Verdict::Refuse(Reason::Queue(served.route.queue));
        }
        let (sender, outcome) = oneshot::channel();
        let (number, since) = (inner.tickets, Instant::now());
        inner.tickets += 1;
        inner.version += 1;
        inner.waiting.insert(
            number,
            Waiter {
                since,
                busy: busy.clone(),
                outcome: sender,
            },
        );
        let first = inner.waiting.len() == 1;
        drop(inner);
        self.counts.held.add(1);
        if first {
            self.hub.wanted();
        } else {
            self.hub.changed();
        }
        Verdict::Wait(Ticket {
            served,
            seat: self.clone(),
            number,
            since,
            outcome,
        })
    }

    fn known(&self, inner: &Inner, epoch: u64) -> Result<(), Refusal> {
        let newest = inner.served.route.epoch;
        if epoch < newest {
            let message = format!(
                "seat {} follows epoch {newest}, and was spoken to in epoch {epoch}",
                self.name
            );
            return Err(Refusal::new("stale", message));
        }
        Ok(())
    }

    /// Whether a word of this epoch counts.
    pub fn check(&self, epoch: u64) -> Result<(), Refusal> {
        self.known(&self.inner(), epoch)
    }

    /// Follows a new route from now on. Connections to the server are kept only while the seat stays open in one epoch.
    pub fn set(self: &Arc<Self>, route: Route, paths: Paths) -> Result<(), Refusal> {
        let mut inner = self.inner();
        self.known(&inner, route.epoch)?;
        let before = inner.served.clone();
        let same = before.route.epoch == route.epoch
            && before.route.backend == route.backend
            && before.route.state == State::Open
            && route.state == State::Open
            && !inner.draining;
        let pool = if same {
            before.pool.clone()
        } else {
            route.backend.map(Pool::new)
        };
        if let (false, Some(old)) = (same, &before.pool) {
            old.close();
        }
        inner.served = Arc::new(Served { route, paths, pool });
        inner.settings += 1;
        inner.draining = false;
        inner.version += 1;
        let freed = match inner.gate() {
            State::Held => BTreeMap::new(),
            State::Open | State::Away => std::mem::take(&mut inner.waiting),
        };
        let open = inner.gate() == State::Open;
        let outcomes: Vec<_> = freed
            .into_values()
            .map(|waiter| {
                let outcome = if open {
                    Ok(Pass::new(self, &mut inner, &waiter.busy))
                } else {
                    Err(Reason::Away)
                };
                (waiter.outcome, outcome)
            })
            .collect();
        drop(inner);
        self.deliver(outcomes);
        Ok(())
    }

    /// Tells those who waited, in the order in which they came; without the lock, for who has gone gives its pass back.
    fn deliver(&self, outcomes: Vec<(oneshot::Sender<Outcome>, Outcome)>) {
        for (waiter, outcome) in outcomes {
            let _ = waiter.send(outcome);
        }
        self.idle.notify_waiters(); // a drain looks whether it was overruled
        self.hub.changed();
    }

    /// Lets nobody in any more, and refuses those who wait.
    pub fn close(&self, reason: &Reason) {
        let mut inner = self.inner();
        inner.closed = Some(reason.clone());
        inner.version += 1;
        let waiting = std::mem::take(&mut inner.waiting);
        drop(inner);
        self.deliver(
            waiting
                .into_values()
                .map(|waiter| (waiter.outcome, Err(reason.clone())))
                .collect(),
        );
    }

    /// Holds what comes from now on, and waits until nothing is in flight, at most until the deadline.
    pub async fn drain(&self, epoch: u64, patience: Duration, cut: bool) -> Result<Drained, Refusal> {
        let settings = {
            let mut inner = self.inner();
            self.known(&inner, epoch)?;
            inner.draining = true;
            inner.version += 1;
            inner.settings
        };
        self.hub.changed();
        let left = self.emptied(settings, patience).await?;
        if left == 0 || !cut {
            return Ok(Drained { left, cut: 0 });
        }
        self.connections.cut();
        let still = self.emptied(settings, CUTTING).await?;
        self.counts.cut.add((left - still.min(left)) as u64);
        Ok(Drained {
            left: still,
            cut: left - still.min(left),
        })
    }

    /// Waits for the end of what is in flight; returns how much is left.
    async fn emptied(&self, settings: u64, patience: Duration) -> Result<usize, Refusal> {
        let deadline = tokio::time::Instant::now() + patience;
        loop {
            let notified = self.idle.notified();
            tokio::pin!(notified);
            notified.as_mut().enable();
            let left = {
                let inner = self.inner();
                if inner.settings != settings {
                    let message = format!("seat {} was given a new route while it was drained", self.name);
                    return Err(Refusal::new("overruled", message));
                }
                inner.in_flight
            };
            if left == 0 || timeout_at(deadline, notified).await.is_err() {
                return Ok(left);
            }
        }
    }

    pub fn in_flight(&self) -> usize {
        self.inner().in_flight
    }

    /// Counts what the server did not answer, which the node is told.
    pub fn failed(&self, reached: bool) {
        if reached {
            self.counts.broken.add(1)
        } else {
            self.counts.unreached.add(1)
        }
        self.touched();
    }

    /// What goes on, if anything has changed since version `seen`.
    pub fn traffic(&self, seen: u64) -> Option<(u64, Traffic)> {
        let inner = self.inner();
        if inner.version == seen {
            return None;
        }
        let now = Instant::now();
        let traffic = Traffic {
            seat: self.name.clone(),
            epoch: inner.served.route.epoch,
            state: inner.served.route.state,
            draining: inner.draining,
            held: inner.waiting.len(),
            oldest: inner
                .waiting
                .values()
                .next()
                .map(|waiter| (now - waiter.since).as_secs_f64()),
            in_flight: inner.in_flight,
            ended: inner.ended.map(|ended| (now - ended).as_secs_f64()),
            failed: self.counts.unreached.value() + self.counts.broken.value(),
        };
        Some((inner.version, traffic))
    }
}
