//! The private pages of a stopped process as a layer.
//!
//! A page of a private file mapping that was never written is a file page (bit 61) or not present:
//! clean. One that was written, or read where nothing is mapped (the zero page), is present without
//! bit 61, or swapped (bit 62). Source: Linux, Documentation/admin-guide/mm/pagemap.rst.

use std::fs::File;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::Arc;

use serde::Deserialize;

use crate::backend::Files;
use crate::error::{Context, Error, Result};
use crate::layer::writer::Written;
use crate::memory::pages::{Copied, PAGE, Source, ZeroPages, check_memory_size, make_layer};

const PRESENT: u64 = 1 << 63;
const SWAPPED: u64 = 1 << 62;
const FILE_OR_SHARED: u64 = 1 << 61;
const PAGEMAP_ENTRY: u64 = 8;

/// Body of `POST /memory/capture`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CaptureRequest {
    pub layer: PathBuf,
    size: u64,
    ranges: Vec<MemoryRange>,
}

/// Where a part of the guest's memory is in the process. Bytes, multiples of the page.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct MemoryRange {
    guest_offset: u64,
    host_address: u64,
    length: u64,
}

struct ProcessMemory {
    memory: File,
    pagemap: File,
    /// Sorted by guest offset, disjoint.
    ranges: Vec<MemoryRange>,
}

/// Captures what is private to the process whose `mem` and `pagemap` these are. The process must
/// not run meanwhile.
///
/// # Errors
/// Nothing is left behind. `invalid` for ranges that overlap or do not fit.
pub fn capture(
    files: Arc<dyn Files>,
    request: CaptureRequest,
    memory: OwnedFd,
    pagemap: OwnedFd,
) -> Result<(Written, Copied)> {
    let ranges = sorted(request.ranges, request.size)?;
    let source = ProcessMemory {
        memory: memory.into(),
        pagemap: pagemap.into(),
        ranges,
    };
    make_layer(files, &request.layer, request.size, &source, ZeroPages::Map)
}

fn sorted(mut ranges: Vec<MemoryRange>, size: u64) -> Result<Vec<MemoryRange>> {
    check_memory_size(size)?;
    ranges.sort_by_key(|range| range.guest_offset);
    let mut end = 0;
    for range in &ranges {
        let aligned = (range.guest_offset | range.host_address | range.length) % PAGE == 0;
        let guest_end = range
            .guest_offset
            .checked_add(range.length)
            .filter(|&end| end <= size);
        let host_end = range
            .host_address
            .checked_add(range.length)
            .filter(|&end| i64::try_from(end).is_ok());
        match guest_end.filter(|_| aligned && host_end.is_some() && range.guest_offset >= end) {
            Some(guest_end) => end = guest_end,
            None => {
                return Err(Error::invalid(format!(
                    "{range:?}: unaligned, overlapping or out of bounds"
                )));
            }
        }
    }
    Ok(ranges)
}

impl ProcessMemory {
    /// Host address of a guest offset in one of the ranges.
    fn address(&self, offset: u64) -> u64 {
        let index = self
            .ranges
            .partition_point(|range| range.guest_offset + range.length <= offset);
        self.ranges[index].host_address + (offset - self.ranges[index].guest_offset)
    }
}

impl Source for ProcessMemory {
    fn ranges(&self) -> Vec<Range<u64>> {
        self.ranges
            .iter()
            .map(|range| range.guest_offset..range.guest_offset + range.length)
            .collect()
    }

    fn extents(&self, window: Range<u64>) -> Result<Vec<Range<u64>>> {
        let pages = ((window.end - window.start) / PAGE) as usize;
        let mut flags = vec![0; pages * PAGEMAP_ENTRY as usize];
        let place = self.address(window.start) / PAGE * PAGEMAP_ENTRY;
        self.pagemap
            .read_exact_at(&mut flags, place)
            .context(|| "read the page map of the process".into())?;
        let mut extents: Vec<Range<u64>> = Vec::new();
        let (entries, _) = flags.as_chunks::<{ PAGEMAP_ENTRY as usize }>();
        for (page, flags) in entries
            .iter()
            .map(|bytes| u64::from_le_bytes(*bytes))
            .enumerate()
        {
            if flags & SWAPPED == 0 && flags & (PRESENT | FILE_OR_SHARED) != PRESENT {
                continue;
            }
            let start = window.start + page as u64 * PAGE;
            match extents.last_mut().filter(|last| last.end == start) {
                Some(last) => last.end += PAGE,
                None => extents.push(start..start + PAGE),
            }
        }
        Ok(extents)
    }

    fn read(&self, offset: u64, buffer: &mut [u8]) -> Result<()> {
        let address = self.address(offset);
        self.memory
            .read_exact_at(buffer, address)
            .context(|| format!("read the process's memory at {address:#x}"))
    }
}
