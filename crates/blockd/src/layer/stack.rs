//! A stack of sealed layers as one read-only image.

use std::path::PathBuf;
use std::sync::Arc;

use crate::error::{Context, Error, Result};
use crate::format::lsmt::{Entry, MAX_LAYERS, SECTOR};
use crate::layer::index::{compose, overlay, touching};
use crate::layer::sealed::{Layer, LayerStore};

/// Immutable. Reads take no locks.
pub struct Stack {
    /// Bottom to top.
    layers: Vec<Arc<Layer>>,
    /// Sorted and disjoint; an entry's tag is the number of its layer.
    merged: Vec<Entry>,
}

impl Stack {
    pub fn open(store: &LayerStore, paths: &[PathBuf]) -> Result<Self> {
        if paths.len() > MAX_LAYERS {
            return Err(Error::invalid(format!(
                "{} layers; a stack has at most {MAX_LAYERS}",
                paths.len()
            )));
        }
        let layers = paths
            .iter()
            .map(|path| store.open(path))
            .collect::<Result<Vec<_>>>()?;
        let indices: Vec<&[Entry]> = layers.iter().map(|layer| layer.index.as_slice()).collect();
        let merged = compose(&indices);
        Ok(Self { layers, merged })
    }

    /// This stack with one more layer on top, which must fit: see [`Self::is_full`].
    pub fn with(&self, layer: Arc<Layer>) -> Self {
        let number = self.layers.len() as u8;
        let top: Vec<Entry> = layer
            .index
            .iter()
            .map(|entry| entry.with_tag(number))
            .collect();
        let merged = overlay(&self.merged, &top);
        Self {
            layers: self.layers.iter().cloned().chain([layer]).collect(),
            merged,
        }
    }

    /// The very same open layers, in the same order.
    pub fn same_layers(&self, other: &Self) -> bool {
        self.layers.len() == other.layers.len()
            && self
                .layers
                .iter()
                .zip(&other.layers)
                .all(|(left, right)| Arc::ptr_eq(left, right))
    }

    pub fn is_full(&self) -> bool {
        self.layers.len() >= MAX_LAYERS
    }

    pub fn layers(&self) -> &[Arc<Layer>] {
        &self.layers
    }

    /// The entries of all layers, sorted and disjoint; a tag is the number of a layer.
    pub fn merged(&self) -> &[Entry] {
        &self.merged
    }

    pub fn paths(&self) -> Vec<PathBuf> {
        self.layers.iter().map(|layer| layer.path.clone()).collect()
    }

    /// Bytes: that of the topmost layer which has one; 0 if none has.
    pub fn virtual_size(&self) -> u64 {
        self.layers
            .iter()
            .rev()
            .map(|layer| layer.virtual_size)
            .find(|&size| size != 0)
            .unwrap_or(0)
    }

    /// Fills `buffer` from byte `offset` on; both are multiples of the sector. After a failure the
    /// buffer's content is undefined.
    pub fn read(&self, offset: u64, buffer: &mut [u8]) -> Result<()> {
        debug_assert!(
            offset.is_multiple_of(SECTOR) && (buffer.len() as u64).is_multiple_of(SECTOR)
        );
        let sectors = offset / SECTOR..(offset + buffer.len() as u64) / SECTOR;
        let place = |sector: u64| ((sector - sectors.start) * SECTOR) as usize;
        let mut at = sectors.start;
        for entry in touching(&self.merged, &sectors) {
            let part = entry.slice(
                entry.sector().max(sectors.start),
                entry.end().min(sectors.end),
            );
            buffer[place(at)..place(part.sector())].fill(0);
            let target = &mut buffer[place(part.sector())..place(part.end())];
            if part.is_zeroed() {
                target.fill(0);
            } else {
                let layer = &self.layers[usize::from(part.tag())];
                layer
                    .blob
                    .read_at(target, part.physical() * SECTOR)
                    .context(|| format!("read layer {}", layer.path.display()))?;
            }
            at = part.end();
        }
        buffer[place(at)..].fill(0);
        Ok(())
    }
}
