//! Guest memory: which pages of a process are its own, and the layers made of them.

pub mod capture;
pub mod pages;
