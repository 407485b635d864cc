//! Files and directories of the sandbox: `filesystem.Filesystem` of the envd protocol, and what `/files` builds on.
//!
//! Operations run with the agent's own rights, on the blocking pool. What they create belongs to the calling user.

mod entry;
pub mod reading;
mod service;
pub mod tree;
pub mod writing;

pub use service::Filesystem;
