//! Counters, and their Prometheus text.

use std::fmt::Write;
use std::sync::atomic::{AtomicU64, Ordering};

pub struct Metrics {
    pub reads: AtomicU64,
    pub read_bytes: AtomicU64,
    pub writes: AtomicU64,
    pub written_bytes: AtomicU64,
    pub discards: AtomicU64,
    pub flushes: AtomicU64,
    pub snapshots: AtomicU64,
    pub captures: AtomicU64,
    pub captured_pages: AtomicU64,
}

/// Of this process, since it started.
pub static METRICS: Metrics = Metrics {
    reads: AtomicU64::new(0),
    read_bytes: AtomicU64::new(0),
    writes: AtomicU64::new(0),
    written_bytes: AtomicU64::new(0),
    discards: AtomicU64::new(0),
    flushes: AtomicU64::new(0),
    snapshots: AtomicU64::new(0),
    captures: AtomicU64::new(0),
    captured_pages: AtomicU64::new(0),
};

impl Metrics {
    pub fn text(&self, images: usize) -> String {
        let counters = [
            ("reads", "Read requests answered.", &self.reads),
            ("read_bytes", "Bytes read by VMMs.", &self.read_bytes),
            ("writes", "Write requests answered.", &self.writes),
            (
                "written_bytes",
                "Bytes written by VMMs.",
                &self.written_bytes,
            ),
            ("discards", "Discards and zero-writes.", &self.discards),
            ("flushes", "Flushes asked for by VMMs.", &self.flushes),
            ("snapshots", "Uppers sealed.", &self.snapshots),
            ("captures", "Memory layers made.", &self.captures),
            (
                "captured_pages",
                "Pages stored in them.",
                &self.captured_pages,
            ),
        ];
        let mut text = format!(
            "# HELP blockd_images Open images.\n# TYPE blockd_images gauge\nblockd_images {images}\n"
        );
        for (name, help, value) in counters {
            let value = value.load(Ordering::Relaxed);
            // Writing to a String cannot fail.
            let _ = write!(
                text,
                "# HELP blockd_{name}_total {help}\n# TYPE blockd_{name}_total counter\nblockd_{name}_total {value}\n"
            );
        }
        text
    }
}
