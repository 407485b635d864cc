//! Sealed layers and stacks of them: opening, reading, making. Knows nothing of disks, VMs or exports.

pub mod compact;
pub mod import;
pub mod index;
pub mod sealed;
pub mod stack;
#[cfg(test)]
mod tests;
pub mod writer;
