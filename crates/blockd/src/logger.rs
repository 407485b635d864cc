//! The log: a line per event, with the time, on standard error or appended to a file.

use std::fs::File;
use std::io::Write;
use std::os::fd::AsFd;
use std::path::Path;
use std::time::SystemTime;

use log::{LevelFilter, Log, Metadata, Record};

use crate::error::{Context, Error, Result};

struct Logger(File);

impl Log for Logger {
    fn enabled(&self, _metadata: &Metadata<'_>) -> bool {
        true
    }

    fn log(&self, record: &Record<'_>) {
        let now = SystemTime::now()
            .duration_since(SystemTime::UNIX_EPOCH)
            .unwrap_or_default();
        let line = format!(
            "{}.{:03} {} {}\n",
            now.as_secs(),
            now.subsec_millis(),
            record.level(),
            record.args()
        );
        // One write a line, so that lines of different threads do not mix. There is nowhere to say
        // that it failed.
        let _ = (&self.0).write_all(line.as_bytes());
    }

    fn flush(&self) {}
}

/// From now on events of level info and above are written to `path`, or to standard error.
pub fn start(path: Option<&Path>) -> Result<()> {
    let file = match path {
        Some(path) => File::options()
            .create(true)
            .append(true)
            .open(path)
            .context(|| format!("open log {}", path.display()))?,
        None => std::io::stderr()
            .as_fd()
            .try_clone_to_owned()
            .context(|| "open standard error".into())?
            .into(),
    };
    log::set_boxed_logger(Box::new(Logger(file)))
        .map_err(|error| Error::invalid(error.to_string()))?;
    log::set_max_level(LevelFilter::Info);
    Ok(())
}
