//! Processes of the sandbox: `process.Process` of the envd protocol.
//!
//! ```text
//! service    the RPCs                           │ table    running ones, reaping, signals
//! launch     a request becomes a process        │ spawn    clone, become the user, exec
//! supervise  the process until its end          │ channel  descriptors towards the process
//! output     what it writes, fanned out         │ input    what clients send
//! stream     output, as clients are told it     │
//! ```
//!
//! A process belongs to nobody's connection: it ends by itself, by a signal, or when the deadline of its Start passes, which
//! kills its whole process group. Output nobody listens to is read and dropped, so no process ever waits for a reader that is
//! not there; see `output` for readers that are slow.

mod channel;
mod input;
mod launch;
mod output;
mod service;
mod spawn;
mod stream;
mod supervise;
pub mod table;

pub use service::Processes;
