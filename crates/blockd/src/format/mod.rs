//! File formats: layout and arithmetic, no I/O. What each byte means is in docs/formats/.

pub mod crc;
pub mod lsmt;
pub mod tar;
pub mod zfile;
