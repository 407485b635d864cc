//! `GET /metrics`: how loaded the machine is.

use std::fs;
use std::sync::{Mutex, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use serde::Serialize;

/// Sizes in bytes unless the name says otherwise.
#[derive(Serialize)]
pub struct Report {
    ts: u64,
    cpu_count: usize,
    /// Busy share of all CPUs since the last report (since boot in the first one), percent.
    cpu_used_pct: f32,
    mem_total: u64,
    mem_used: u64,
    mem_cache: u64,
    mem_total_mib: u64,
    mem_used_mib: u64,
    disk_used: u64,
    disk_total: u64,
    #[serde(rename = "lifecycleID")]
    lifecycle_id: String,
}

pub struct Memory {
    pub total: u64,
    pub available: u64,
    pub cached: u64,
}

/// CPU time since boot, in ticks.
#[derive(Clone, Copy, Default)]
struct CpuTime {
    busy: u64,
    total: u64,
}

#[derive(Default)]
pub struct Metrics {
    last: Mutex<CpuTime>,
}

impl Metrics {
    pub fn report(&self, lifecycle_id: String) -> Report {
        let memory = memory().unwrap_or(Memory {
            total: 0,
            available: 0,
            cached: 0,
        });
        let used = memory.total.saturating_sub(memory.available);
        let (disk_total, disk_used) = rustix::fs::statvfs("/").map_or((0, 0), |disk| {
            (
                disk.f_blocks * disk.f_frsize,
                disk.f_blocks.saturating_sub(disk.f_bfree) * disk.f_frsize,
            )
        });
        Report {
            ts: SystemTime::now()
                .duration_since(UNIX_EPOCH)
                .unwrap_or_default()
                .as_secs(),
            cpu_count: std::thread::available_parallelism().map_or(1, usize::from),
            cpu_used_pct: self.cpu_used_percent(),
            mem_total: memory.total,
            mem_used: used,
            mem_cache: memory.cached,
            mem_total_mib: memory.total >> 20,
            mem_used_mib: used >> 20,
            disk_used,
            disk_total,
            lifecycle_id,
        }
    }

    fn cpu_used_percent(&self) -> f32 {
        let now = fs::read_to_string("/proc/stat")
            .ok()
            .and_then(|stat| cpu_time(&stat))
            .unwrap_or_default();
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        let (busy, total) = (
            now.busy.saturating_sub(last.busy),
            now.total.saturating_sub(last.total),
        );
        *last = now;
        if total == 0 {
            0.0
        } else {
            busy as f32 * 100.0 / total as f32
        }
    }
}

pub fn memory() -> Option<Memory> {
    let text = fs::read_to_string("/proc/meminfo").ok()?;
    let value = |name: &str| {
        let line = text
            .lines()
            .find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
        Some(line.split_whitespace().next()?.parse::<u64>().ok()? << 10)
    };
    Some(Memory {
        total: value("MemTotal")?,
        available: value("MemAvailable")?,
        cached: value("Cached")?,
    })
}

/// Sums the first line of /proc/stat; idle and iowait are its fourth and fifth number.
fn cpu_time(stat: &str) -> Option<CpuTime> {
    let numbers = stat
        .lines()
        .next()?
        .strip_prefix("cpu ")?
        .split_whitespace();
    let ticks: Vec<u64> = numbers
        .filter_map(|number| number.parse().ok())
        .take(8)
        .collect();
    let total: u64 = ticks.iter().sum();
    Some(CpuTime {
        busy: total - ticks.get(3)? - ticks.get(4)?,
        total,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn idle_time_is_not_busy() {
        let time = cpu_time("cpu  10 0 5 80 5 0 0 0 3 3\ncpu0 1 1\n").unwrap();
        assert_eq!((time.busy, time.total), (15, 100));
        assert!(cpu_time("intr 1 2").is_none());
    }
}
