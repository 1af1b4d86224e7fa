//! Tells watchers what changes at the seats: gathered over their interval, but at once where a first request is held.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};
use tokio::sync::{Notify, mpsc};

use crate::table::Table;
use crate::wire::VERSION;

/// Where seats say that something has changed.
#[derive(Debug, Default)]
pub struct Hub {
    changes: Notify,
    wants: Notify,
}

impl Hub {
    pub fn changed(&self) {
        self.changes.notify_waiters();
    }

    /// A seat has begun to hold requests.
    pub fn wanted(&self) {
        self.wants.notify_waiters();
        self.changes.notify_waiters();
    }
}

/// Sends events into `lines` until nobody reads them. A slow reader misses steps in between, never the last state.
pub async fn watch(table: Arc<Table>, interval: Duration, lines: mpsc::Sender<String>) {
    let mut seen = HashMap::new();
    let mut first = true;
    loop {
        let changed = table.hub.changes.notified();
        let wanted = table.hub.wants.notified();
        tokio::pin!(changed, wanted);
        changed.as_mut().enable();
        wanted.as_mut().enable();
        let event = news(&table, &mut seen);
        if event.is_some() || first {
            let event = event.unwrap_or_else(|| json!({"v": VERSION, "event": "traffic", "seats": [], "removed": []}));
            if lines.send(event.to_string()).await.is_err() {
                return;
            }
            first = false;
            tokio::select! {
                () = tokio::time::sleep(interval) => {}
                () = wanted => {}
                () = lines.closed() => return,
            }
            continue;
        }
        tokio::select! {
            () = changed => {}
            () = lines.closed() => return,
        }
    }
}

fn news(table: &Table, seen: &mut HashMap<String, u64>) -> Option<Value> {
    let seats = table.seats();
    let mut changed = Vec::new();
    for seat in &seats {
        let known = seen.get(&seat.name).copied().unwrap_or(0);
        if let Some((version, traffic)) = seat.traffic(known) {
            seen.insert(seat.name.clone(), version);
            changed.push(traffic);
        }
    }
    let mut removed = Vec::new();
    seen.retain(|name, _| {
        let there = seats.iter().any(|seat| seat.name == *name);
        if !there {
            removed.push(name.clone());
        }
        there
    });
    if changed.is_empty() && removed.is_empty() {
        return None;
    }
    Some(json!({"v": VERSION, "event": "traffic", "seats": changed, "removed": removed}))
}
