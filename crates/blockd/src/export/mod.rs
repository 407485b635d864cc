//! Images as files that a VMM opens.

pub mod fuse;
pub mod mount;
pub mod nodes;
pub mod strand;
