//! What is counted of each seat, for the node's metrics.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use serde_json::{Map, Value, json};

macro_rules! counts {
    ($($field:ident),* $(,)?) => {
        /// Counters since the proxy began to serve the seat.
        #[derive(Debug, Default)]
        pub struct Counts {
            $(pub $field: Count,)*
            pub held_seconds: Histogram,
        }

        impl Counts {
            pub fn shown(&self) -> Value {
                let mut shown = Map::new();
                $(shown.insert(stringify!($field).to_owned(), json!(self.$field.value()));)*
                shown.insert("held_seconds".to_owned(), self.held_seconds.shown());
                Value::Object(shown)
            }
        }
    };
}

counts!(
    requests,            // that came, of every kind
    forwarded,           // to the open seat's server
    held,                // that had to wait
    released,            // of those: forwarded in the end
    left,                // of those: their clients went
    refused_away,        // with 503, for the seat is away or was while they waited
    refused_queue,       // with 503, for too many waited already
    refused_deadline,    // with 503, having waited as long as they may
    refused_connections, // connections: the seat has as many as it may
    blocked,             // with 403
    quiet,               // answered for the parked seat, or passed on to it
    unreached,           // the server could not be connected to
    broken,              // the server went away without an answer
    cut,                 // broken off by a drain
    upgraded,            // became tunnels
);

#[derive(Debug, Default)]
pub struct Count(AtomicU64);

impl Count {
    pub fn add(&self, by: u64) {
        self.0.fetch_add(by, Relaxed);
    }

    pub fn value(&self) -> u64 {
        self.0.load(Relaxed)
    }
}

const BOUNDS: [f64; 13] = [
    0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0,
];

/// How long requests were held that were forwarded in the end, in seconds.
#[derive(Debug, Default)]
pub struct Histogram {
    buckets: [AtomicU64; BOUNDS.len() + 1],
    microseconds: AtomicU64,
}

impl Histogram {
    pub fn add(&self, time: Duration) {
        let at = BOUNDS.partition_point(|bound| *bound < time.as_secs_f64());
        self.buckets[at].fetch_add(1, Relaxed);
        self.microseconds.fetch_add(time.as_micros() as u64, Relaxed);
    }

    /// `buckets` are not cumulative; the last has no bound.
    fn shown(&self) -> Value {
        let buckets: Vec<u64> = self.buckets.iter().map(|each| each.load(Relaxed)).collect();
        json!({"bounds": BOUNDS, "buckets": buckets, "sum": self.microseconds.load(Relaxed) as f64 / 1e6})
    }
}
