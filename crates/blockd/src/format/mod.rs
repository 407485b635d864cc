//! File formats: layout and arithmetic, no I/O. What each byte means is in docs/formats/.

pub mod lsmt;
