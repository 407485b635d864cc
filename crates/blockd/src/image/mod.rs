//! Images: stacks of layers with what makes them usable, and the table of what is open.

pub mod disk;
#[cfg(test)]
mod disk_tests;
pub mod frozen;
pub mod table;
pub mod upper;
