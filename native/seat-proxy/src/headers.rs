//! What changes in a message's head on its way: hop-by-hop fields end here, and the server learns who asks.
//! RFC 9110, sections 7.2, 7.6 and 7.8; RFC 9113, section 8.2.

use std::net::IpAddr;

use hyper::header::{
    ACCEPT_ENCODING, CONNECTION, CONTENT_TYPE, COOKIE, EXPECT, HOST, HeaderMap, HeaderName, HeaderValue, TE,
    TRANSFER_ENCODING, UPGRADE,
};
use hyper::http::request::Parts;
use hyper::http::uri::{PathAndQuery, Scheme, Uri};
use hyper::{Method, Version};

const FORWARDED_FOR: HeaderName = HeaderName::from_static("x-forwarded-for");
const SINGLE_HOP: [HeaderName; 6] = [
    HeaderName::from_static("keep-alive"),
    HeaderName::from_static("proxy-connection"),
    HeaderName::from_static("proxy-authenticate"),
    HeaderName::from_static("proxy-authorization"),
    HeaderName::from_static("http2-settings"),
    TRANSFER_ENCODING,
];

/// Whether a request is one of gRPC, which HTTP/2 alone carries.
pub fn is_grpc(parts: &Parts) -> bool {
    let kind = parts.headers.get(CONTENT_TYPE).map_or(&b""[..], HeaderValue::as_bytes);
    parts.version == Version::HTTP_2 && kind.starts_with(b"application/grpc")
}

/// The protocol that a client of HTTP/1.1 asks to go over to. HTTP/2 is none of them: behind such an upgrade whatever
/// the client asked for would get past us.
pub fn upgrade(parts: &Parts) -> Option<HeaderValue> {
    if parts.version != Version::HTTP_11 || !listed(&parts.headers, CONNECTION).any(|each| each == "upgrade") {
        return None;
    }
    let wanted = parts.headers.get(UPGRADE)?;
    let hidden = listed(&parts.headers, UPGRADE).any(|each| each.starts_with("h2") || each.starts_with("http"));
    (!hidden).then(|| wanted.clone())
}

/// Whether the client waits for word before it sends its body.
pub fn expects(parts: &Parts) -> bool {
    parts.version == Version::HTTP_11 && listed(&parts.headers, EXPECT).any(|each| each == "100-continue")
}

/// The items of a header that is a list, in lower case.
fn listed(headers: &HeaderMap, name: HeaderName) -> impl Iterator<Item = String> {
    headers
        .get_all(name)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .map(|each| each.trim().to_ascii_lowercase())
}

/// Takes off what was meant for us alone.
pub fn strip(headers: &mut HeaderMap) {
    if headers.contains_key(CONNECTION) {
        let named: Vec<String> = listed(headers, CONNECTION).collect();
        for name in named {
            // Whatever a client lists there, the message's own fields stay.
            if !matches!(
                name.as_str(),
                "host" | "content-length" | "content-type" | "close" | "upgrade" | "te"
            ) {
                headers.remove(name.as_str());
            }
        }
        headers.remove(CONNECTION);
    }
    for name in SINGLE_HOP {
        headers.remove(name);
    }
    headers.remove(UPGRADE);
}

/// Makes a client's request one to the server, by HTTP/2 if `shared`.
pub fn towards_server(parts: &mut Parts, client: IpAddr, upgrade: Option<HeaderValue>, shared: bool) {
    let trailers = listed(&parts.headers, TE).any(|each| each == "trailers");
    strip(&mut parts.headers);
    parts.headers.remove(TE);
    if shared && trailers {
        parts.headers.insert(TE, HeaderValue::from_static("trailers"));
    }
    if let Some(upgrade) = upgrade {
        parts.headers.insert(CONNECTION, HeaderValue::from_static("upgrade"));
        parts.headers.insert(UPGRADE, upgrade);
    }
    forwarded_for(&mut parts.headers, client);
    if !shared {
        join_cookies(&mut parts.headers);
    }
    // Of an absolute request target the authority counts, and not what Host says.
    let host = match parts.uri.authority() {
        Some(authority) => HeaderValue::from_str(authority.as_str()).ok(),
        None => parts.headers.get(HOST).cloned(),
    };
    let path = match parts.uri.path_and_query() {
        Some(path) if parts.method != Method::OPTIONS || path != "*" => path.clone(),
        _ => PathAndQuery::from_static(if parts.method == Method::OPTIONS { "*" } else { "/" }),
    };
    if shared {
        parts.headers.remove(HOST);
        let authority = host
            .as_ref()
            .and_then(|host| host.to_str().ok())
            .unwrap_or("localhost")
            .to_owned();
        let uri = Uri::builder()
            .scheme(Scheme::HTTP)
            .authority(authority)
            .path_and_query(path.clone())
            .build();
        parts.uri = uri.unwrap_or_else(|_| Uri::from(path));
        parts.version = Version::HTTP_2;
    } else {
        if let Some(host) = host {
            parts.headers.insert(HOST, host);
        }
        parts.uri = Uri::from(path);
        parts.version = Version::HTTP_11;
    }
}

/// A reply that is to be read here as well must come as it is.
pub fn uncompressed(parts: &mut Parts) {
    parts.headers.remove(ACCEPT_ENCODING);
}

fn forwarded_for(headers: &mut HeaderMap, client: IpAddr) {
    let client = client.to_canonical().to_string();
    let mut list = Vec::new();
    for value in headers.get_all(FORWARDED_FOR) {
        list.extend_from_slice(value.as_bytes());
        list.extend_from_slice(b", ");
    }
    list.extend_from_slice(client.as_bytes());
    if let Ok(value) = HeaderValue::from_bytes(&list) {
        headers.insert(FORWARDED_FOR, value);
    }
}

/// HTTP/2 clients may send cookies one by one; servers of HTTP/1.1 know one field only.
fn join_cookies(headers: &mut HeaderMap) {
    if headers.get_all(COOKIE).iter().nth(1).is_some() {
        let all: Vec<&[u8]> = headers.get_all(COOKIE).iter().map(HeaderValue::as_bytes).collect();
        if let Ok(joined) = HeaderValue::from_bytes(&all.join(&b"; "[..])) {
            headers.insert(COOKIE, joined);
        }
    }
}
