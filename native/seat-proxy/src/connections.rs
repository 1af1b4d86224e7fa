//! The clients' connections of one seat: how many there are, and which are broken off when a drain may wait no longer.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::task::AbortHandle;

#[derive(Debug, Default)]
pub struct Connections {
    open: Mutex<HashMap<u64, Entry>>,
    numbers: AtomicU64,
}

#[derive(Debug)]
struct Entry {
    /// Of the task that serves it, once there is one.
    task: Option<AbortHandle>,
    busy: Arc<AtomicUsize>,
}

/// A connection's place among those of its seat, free again when dropped.
#[derive(Debug)]
pub struct Place {
    all: Arc<Connections>,
    number: u64,
    /// Requests of this connection that are in flight.
    pub busy: Arc<AtomicUsize>,
}

impl Drop for Place {
    fn drop(&mut self) {
        self.all.open().remove(&self.number);
    }
}

impl Connections {
    fn open(&self) -> MutexGuard<'_, HashMap<u64, Entry>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A place, or none if `most` are taken.
    pub fn enter(self: &Arc<Self>, most: usize) -> Option<Place> {
        let mut open = self.open();
        if open.len() >= most {
            return None;
        }
        let number = self.numbers.fetch_add(1, Relaxed);
        let place = Place {
            all: self.clone(),
            number,
            busy: Arc::default(),
        };
        open.insert(
            number,
            Entry {
                task: None,
                busy: place.busy.clone(),
            },
        );
        Some(place)
    }

    pub fn count(&self) -> usize {
        self.open().len()
    }

    /// Runs what serves a connection, so that it can be broken off. The work owns the place.
    pub fn spawn(self: &Arc<Self>, place: Place, work: impl Future<Output = ()> + Send + 'static) {
        let number = place.number;
        let task = tokio::spawn(async move {
            work.await;
            drop(place);
        });
        if let Some(entry) = self.open().get_mut(&number) {
            entry.task = Some(task.abort_handle());
        }
    }

    /// Breaks off those with a request in flight. What one of them holds beside it goes with it.
    pub fn cut(&self) {
        for entry in self.open().values().filter(|entry| entry.busy.load(Relaxed) > 0) {
            if let Some(task) = &entry.task {
                task.abort();
            }
        }
    }
}
