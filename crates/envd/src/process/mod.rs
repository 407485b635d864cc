//! Processes of the sandbox: `process.Process` of the envd protocol.
//!
//! ```text
//! service   the RPCs                         │ launch   a request becomes a process and its tasks
//! table     running ones, reaping            │ spawn    clone, become the user, exec
//! output    what a process writes, fanned out│ channel  descriptors towards the process
//! ```
//!
//! A process belongs to nobody's connection: it ends by itself, by a signal, or when the deadline of its Start passes, which
//! kills its whole process group. Output nobody listens to is read and dropped, so no process ever waits for a reader that is
//! not there; see `output` for readers that are slow.

mod channel;
mod launch;
mod output;
mod service;
mod spawn;
pub mod table;

pub use service::Processes;
