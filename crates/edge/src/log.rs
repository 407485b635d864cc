//! One line per failure, to a file or standard error. Callers pass no headers, no queries and no tokens.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::path::Path;
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant, SystemTime};

/// Hostile clients and guests can cause failures at will; a disk full of them is not theirs to have.
const LINES_PER_SECOND: u32 = 50;

static LOG: OnceLock<Mutex<Log>> = OnceLock::new();

struct Log {
    file: Option<File>,
    window: Instant,
    lines: u32,
}

/// Opens the log, and sends panics there too. Without a path lines go to standard error.
pub fn open(path: Option<&Path>) -> io::Result<()> {
    let file = path
        .map(|path| OpenOptions::new().create(true).append(true).open(path))
        .transpose()?;
    LOG.get_or_init(|| {
        Mutex::new(Log {
            file,
            window: Instant::now(),
            lines: 0,
        })
    });
    std::panic::set_hook(Box::new(|panic| {
        line(&panic.to_string().replace('\n', " "))
    }));
    Ok(())
}

pub fn line(message: &str) {
    let Some(log) = LOG.get() else { return };
    let mut log = log.lock().unwrap_or_else(PoisonError::into_inner);
    if log.window.elapsed() >= Duration::from_secs(1) {
        let dropped = log.lines.saturating_sub(LINES_PER_SECOND);
        (log.window, log.lines) = (Instant::now(), 0);
        if dropped > 0 {
            log.write(&format!("{dropped} lines were left out"));
        }
    }
    log.lines = log.lines.saturating_add(1);
    if log.lines <= LINES_PER_SECOND {
        log.write(message);
    }
}

impl Log {
    /// A log that cannot be written is no reason to stop serving.
    fn write(&mut self, message: &str) {
        let line = format!(
            "{} edge: {message}\n",
            humantime::format_rfc3339_millis(SystemTime::now())
        );
        let _ = match &mut self.file {
            Some(file) => file.write_all(line.as_bytes()),
            None => io::stderr().write_all(line.as_bytes()),
        };
    }
}
