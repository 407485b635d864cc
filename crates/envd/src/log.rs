//! Lines on standard error: the serial console when the agent is PID 1. Few, because a console write is slow and blocks.

use std::fmt::Arguments;
use std::io::Write;

/// Writes one line. A console that fails is no reason to fail.
pub fn write(line: Arguments<'_>) {
    let _ = std::io::stderr().write_all(format!("envd: {line}\n").as_bytes());
}
