//! The API: HTTP/1.1 on a unix socket (docs/protocols/blockd.md).

pub mod api;
pub mod connection;
pub mod listen;
