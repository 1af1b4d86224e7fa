//! Tells blocked and quiet paths from others, however a client spells them.
//!
//! Servers disagree about percent-encoding, double slashes, dot segments and case. A request is forwarded as it came, so a
//! path is blocked where any reading of it that a server might have is: better one refused too many than one let through.

use std::collections::HashMap;

use crate::wire::{Answer, Quiet};

/// What a path means for its request.
#[derive(Debug, PartialEq)]
pub enum Class<'a> {
    Ordinary,
    Blocked,
    /// Neither wakes nor waits; with what it is answered while the seat is not open.
    Quiet(Option<&'a Answer>),
}

/// The quiet and the blocked paths of one route.
#[derive(Debug, Default)]
pub struct Paths {
    quiet: HashMap<String, Option<Answer>>,
    blocked: Vec<String>,
}

/// Percent-encodings within each other that are undone; whoever nests more of them is up to no good.
const NESTED: usize = 4;

impl Paths {
    /// Quiet paths match as a whole, blocked ones with everything below them.
    pub fn new(quiet: &[Quiet], blocked: &[String]) -> Result<Self, String> {
        let mut paths = Self::default();
        for each in quiet {
            paths.quiet.insert(plain(&each.path)?, each.answer.clone());
        }
        for each in blocked {
            paths.blocked.push(plain(each)?);
        }
        Ok(paths)
    }

    pub fn class(&self, path: &str) -> Class<'_> {
        if is_plain(path) {
            return self.judge(path, &[path]);
        }
        let Some(decoded) = decode(path) else {
            return Class::Blocked;
        };
        let whole = segments(&decoded);
        // Some servers end a path at what is a query or a parameter once decoded.
        let cut = segments(decoded.split(['?', '#', ';', '\0']).next().unwrap_or(""));
        let bare = whole
            .iter()
            .map(|each| each.split(';').next().unwrap_or("").to_owned())
            .collect();
        let readings = [whole, cut, bare].map(|each| [join(&resolve(&each)), join(&each)]);
        let readings: Vec<&str> = readings.iter().flatten().map(String::as_str).collect();
        self.judge(readings[0], &readings)
    }

    fn judge(&self, path: &str, readings: &[&str]) -> Class<'_> {
        let under = |reading: &str, above: &str| {
            reading
                .strip_prefix(above)
                .is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
        };
        if self
            .blocked
            .iter()
            .any(|blocked| readings.iter().any(|reading| under(reading, blocked)))
        {
            return Class::Blocked;
        }
        match self.quiet.get(path) {
            Some(answer) => Class::Quiet(answer.as_ref()),
            None => Class::Ordinary,
        }
    }
}

/// Whether nobody could read the path in another way, as nearly every one that is asked for.
fn is_plain(path: &str) -> bool {
    let mut last = b' ';
    for byte in path.bytes() {
        let fine = byte.is_ascii_lowercase() || byte.is_ascii_digit() || matches!(byte, b'/' | b'_' | b'-' | b'.');
        if !fine || (last == b'/' && matches!(byte, b'/' | b'.')) {
            return false;
        }
        last = byte;
    }
    path.starts_with('/') && last != b'/'
}

/// A path as the node writes it: it must be plain, so that nothing about it can be misread.
fn plain(path: &str) -> Result<String, String> {
    let lower = path.to_ascii_lowercase();
    if is_plain(&lower) {
        Ok(lower)
    } else {
        Err(format!("{path:?} is no plain path with a slash in front"))
    }
}

/// Percent-encodings undone until none is left, in lower case; none where too many are nested.
fn decode(path: &str) -> Option<String> {
    let mut bytes = path.as_bytes().to_vec();
    for _ in 0..=NESTED {
        let next = undo(&bytes);
        if next == bytes {
            return Some(String::from_utf8_lossy(&bytes).to_ascii_lowercase());
        }
        bytes = next;
    }
    None
}

fn undo(bytes: &[u8]) -> Vec<u8> {
    let mut result = Vec::with_capacity(bytes.len());
    let mut rest = bytes;
    while let Some((&first, after)) = rest.split_first() {
        if first == b'%' && after.len() >= 2 {
            let digit = |at: usize| char::from(after[at]).to_digit(16);
            if let (Some(high), Some(low)) = (digit(0), digit(1)) {
                result.push((high * 16 + low) as u8);
                rest = &after[2..];
                continue;
            }
        }
        result.push(first);
        rest = after;
    }
    result
}

/// Without the empty ones, and without what some servers strip from a name.
fn segments(path: &str) -> Vec<String> {
    path.split(['/', '\\'])
        .map(|each| {
            each.trim_matches(|c: char| c.is_whitespace() || c.is_control())
                .to_lowercase()
        })
        .filter(|each| !each.is_empty())
        .collect()
}

fn join(segments: &[String]) -> String {
    segments.iter().flat_map(|each| ["/", each]).collect()
}

fn resolve(segments: &[String]) -> Vec<String> {
    let mut result: Vec<String> = Vec::with_capacity(segments.len());
    for each in segments {
        match each.as_str() {
            "." => {}
            ".." => {
                result.pop();
            }
            _ => result.push(each.clone()),
        }
    }
    result
}

#[cfg(test)]
mod tests {
    use super::*;

    fn paths() -> Paths {
        let quiet = [
            Quiet {
                path: "/health".into(),
                answer: None,
            },
            Quiet {
                path: "/v1/models".into(),
                answer: Some(Answer {
                    status: 200,
                    content_type: "application/json".into(),
                    body: "{}".into(),
                }),
            },
        ];
        Paths::new(
            &quiet,
            &["/sleep".into(), "/v1/load_lora_adapter".into(), "/vllm.Control".into()],
        )
        .unwrap()
    }

    #[test]
    fn every_spelling_of_a_blocked_path_is_blocked() {
        for path in [
            "/sleep",
            "/SLEEP",
            "/sleep/",
            "//sleep",
            "/./sleep",
            "/x/../sleep",
            "/%73leep",
            "/%2573leep",
            "/%252573leep",
            "/x/%2e%2e/sleep",
            "/x%2f..%2fsleep",
            "/\\sleep",
            "/%5csleep",
            "/sleep;x=1",
            "/sleep;/x",
            "/sleep%3Flevel=1",
            "/sleep%00",
            "/sleep%20",
            "/sleep%0a",
            "/sleep/../v1/models",
            "/sleep/deeper",
            "/../../sleep",
            "/v1//load_lora_adapter",
            "/v1;a/load_lora_adapter",
            "/vllm.Control/Sleep",
            "/%25252525252573leep",
        ] {
            assert_eq!(paths().class(path), Class::Blocked, "{path}");
        }
    }

    #[test]
    fn others_are_let_through() {
        for path in [
            "/",
            "*",
            "",
            "/asleep",
            "/sleeper",
            "/v1/sleep",
            "/v1/completions",
            "/%",
            "/%zz",
            "/100%25",
            "/%ff",
        ] {
            assert_eq!(paths().class(path), Class::Ordinary, "{path}");
        }
    }

    #[test]
    fn quiet_paths_match_as_a_whole() {
        for path in ["/health", "/health/", "//Health", "/v1/../health"] {
            assert_eq!(paths().class(path), Class::Quiet(None), "{path}");
        }
        assert!(matches!(paths().class("/v1/models"), Class::Quiet(Some(_))));
        assert_eq!(paths().class("/health/deep"), Class::Ordinary);
        assert_eq!(paths().class("/v1/models/a"), Class::Ordinary);
    }

    #[test]
    fn the_node_says_plain_paths() {
        for path in ["", "/", "sleep", "/a/../b", "/%73", "/a;b", "/a b", "/a?b"] {
            assert!(Paths::new(&[], &[path.into()]).is_err(), "{path}");
        }
    }
}
