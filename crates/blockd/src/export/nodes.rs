//! The files that images are exported as: one flat table of unguessable names and inode numbers
//! that are never used twice.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::RwLock;

use crate::export::strand::Strand;
use crate::image::disk::Disk;
use crate::image::frozen::Frozen;
use crate::uuid::random_name;

/// What is behind a file.
#[derive(Clone)]
pub enum Content {
    /// With the order of its slow work.
    Disk(Arc<Disk>, Strand),
    /// A disk without an upper.
    FrozenDisk(Arc<Frozen>),
    Memory(Arc<Frozen>),
}

#[derive(Clone)]
pub struct Node {
    pub content: Content,
    /// Owner of the file.
    pub uid: u32,
}

impl Node {
    /// Bytes.
    pub fn size(&self) -> u64 {
        match &self.content {
            Content::Disk(disk, _) => disk.size(),
            Content::FrozenDisk(frozen) | Content::Memory(frozen) => frozen.size,
        }
    }

    /// Permission bits. Memory is opened read-write by VMMs that only ever map it privately; every
    /// write to it is refused.
    pub const fn mode(&self) -> u16 {
        match self.content {
            Content::Disk(..) | Content::FrozenDisk(_) => 0o600,
            Content::Memory(_) => 0o666,
        }
    }
}

#[derive(Default)]
struct Table {
    nodes: HashMap<u64, Node>,
    names: HashMap<String, u64>,
}

pub struct Exports {
    table: RwLock<Table>,
    next: AtomicU64,
}

impl Exports {
    pub fn new() -> Arc<Self> {
        // 1 is the root directory.
        Arc::new(Self {
            table: RwLock::default(),
            next: AtomicU64::new(2),
        })
    }

    /// Exports `node` until the returned value is dropped.
    pub fn add(self: &Arc<Self>, node: Node) -> Export {
        let inode = self.next.fetch_add(1, Ordering::Relaxed);
        let name = random_name();
        let mut table = self.table.write();
        table.nodes.insert(inode, node);
        table.names.insert(name.clone(), inode);
        Export {
            exports: self.clone(),
            inode,
            name,
        }
    }

    pub fn by_name(&self, name: &str) -> Option<(u64, Node)> {
        let table = self.table.read();
        let inode = *table.names.get(name)?;
        Some((inode, table.nodes.get(&inode)?.clone()))
    }

    pub fn by_inode(&self, inode: u64) -> Option<Node> {
        self.table.read().nodes.get(&inode).cloned()
    }
}

/// A file in the mount; dropping it removes the file. A process that still has it open gets ESTALE.
pub struct Export {
    exports: Arc<Exports>,
    inode: u64,
    pub name: String,
}

impl Drop for Export {
    fn drop(&mut self) {
        let mut table = self.exports.table.write();
        table.names.remove(&self.name);
        table.nodes.remove(&self.inode);
    }
}
