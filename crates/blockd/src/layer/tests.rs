//! Layers of others, and hostile ones.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::error::Code;
use crate::format::lsmt::{BLOCK, Entry, Header, Role};
use crate::layer::sealed::LayerStore;
use crate::layer::stack::Stack;
use crate::testing::{MemoryFiles, Random, golden, golden_image};
use crate::uuid::Uuid;

fn store_of(layers: &[&[u8]]) -> (LayerStore, Vec<PathBuf>) {
    let files = MemoryFiles::new();
    let paths: Vec<PathBuf> = (0..layers.len())
        .map(|number| format!("/{number}").into())
        .collect();
    for (path, layer) in paths.iter().zip(layers) {
        files.put(path, layer.to_vec());
    }
    (LayerStore::new(files), paths)
}

fn content(layers: &[&[u8]]) -> Vec<u8> {
    let (store, paths) = store_of(layers);
    let stack = Stack::open(&store, &paths).unwrap();
    let mut image = vec![0xaa; stack.virtual_size() as usize];
    for (number, part) in image.chunks_mut(1 << 20).enumerate() {
        stack.read((number as u64) << 20, part).unwrap();
    }
    image
}

#[test]
fn golden_layers_hold_what_their_writer_was_told() {
    let zeros = vec![0; 16 << 20];
    let stacks: [(&[&str], Vec<u8>); 9] = [
        (&["empty.lsmt"], zeros.clone()),
        (&["emptys.lsmt"], zeros),
        (&["l1.lsmt"], golden_image(&["l1"])),
        (&["l1s.lsmt"], golden_image(&["l1"])),
        (&["l2.lsmt"], golden_image(&["l2"])),
        (&["l1.lsmt", "l2.lsmt"], golden_image(&["l1", "l2"])),
        (&["l1.lsmt", "l2h.lsmt"], golden_image(&["l1", "l2"])),
        (&["l12.lsmt"], golden_image(&["l1", "l2"])),
        (&["l12.lsmt", "empty.lsmt"], golden_image(&["l1", "l2"])),
    ];
    for (names, expected) in stacks {
        // l1s and l12 are too large to commit.
        let Some(layers) = names
            .iter()
            .map(|name| golden(name))
            .collect::<Option<Vec<_>>>()
        else {
            continue;
        };
        let layers: Vec<&[u8]> = layers.iter().map(Vec::as_slice).collect();
        assert!(content(&layers) == expected, "{names:?}");
    }
}

/// A layer of these entries over `sectors` sectors of data, with nothing checked.
fn raw_layer(sectors: usize, entries: &[Entry], change: impl FnOnce(&mut Header)) -> Vec<u8> {
    let mut trailer = Header {
        role: Role::Trailer,
        index_offset: BLOCK + 512 * sectors as u64,
        index_size: entries.len() as u64,
        virtual_size: 1 << 20,
        uuid: Some(Uuid::random()),
        parent: None,
        marked: false,
    };
    let header = Header {
        role: Role::SealedHeader,
        index_offset: 0,
        index_size: 0,
        ..trailer
    };
    change(&mut trailer);
    let mut layer = header.encode().to_vec();
    layer.resize(layer.len() + 512 * sectors, 7);
    layer.extend(entries.iter().flat_map(|entry| entry.to_bytes()));
    layer.resize(layer.len().next_multiple_of(BLOCK as usize), 0);
    layer.extend_from_slice(&trailer.encode());
    layer
}

fn refused(layer: &[u8]) -> bool {
    let (store, paths) = store_of(&[layer]);
    match Stack::open(&store, &paths) {
        Ok(_) => false,
        Err(error) => {
            assert_eq!(error.code, Code::Corrupt, "{error}");
            true
        }
    }
}

#[test]
fn a_sound_layer_is_accepted_and_its_lies_are_not() {
    let good = [Entry::data(0, 4, 8), Entry::zeroed(4, 4), Entry::PADDING];
    assert!(!refused(&raw_layer(8, &good, |_| ())));
    let lies: [&[Entry]; 7] = [
        &[Entry::data(0, 4, 7)],
        &[Entry::data(0, 9, 8)],
        &[Entry::data(0, 4, (1 << 55) - 1)],
        &[Entry::data(4, 4, 8), Entry::data(0, 4, 8)],
        &[Entry::data(0, 4, 8), Entry::data(3, 4, 8)],
        &[Entry::data(0, 4, 8), Entry::zeroed(3, 1)],
        &[Entry::zeroed((1 << 50) - 1, 2)],
    ];
    for entries in lies {
        assert!(refused(&raw_layer(8, entries, |_| ())), "{entries:?}");
    }
    assert!(refused(&raw_layer(8, &good, |trailer| trailer
        .index_size =
        u64::MAX)));
    assert!(refused(&raw_layer(8, &good, |trailer| trailer
        .index_size =
        1 << 60)));
    assert!(refused(&raw_layer(8, &good, |trailer| trailer
        .index_size =
        1000)));
    assert!(refused(&raw_layer(8, &good, |trailer| trailer
        .index_offset =
        0)));
    assert!(refused(&raw_layer(8, &good, |trailer| trailer
        .index_offset =
        u64::MAX)));
    assert!(refused(&raw_layer(8, &good, |trailer| trailer
        .virtual_size =
        511)));
    assert!(refused(&raw_layer(8, &good, |trailer| trailer
        .virtual_size =
        1 << 60)));
    assert!(refused(&raw_layer(8, &good, |trailer| trailer.uuid = None)));
    assert!(refused(
        &raw_layer(8, &good, |trailer| trailer.role = Role::SealedHeader)
    ));
}

#[test]
fn damaged_layers_never_panic_nor_read_outside() {
    let mut random = Random::new(3);
    let sound = golden("l2.lsmt").unwrap();
    for length in (0..sound.len()).step_by(509) {
        assert!(refused(&sound[..length]), "cut to {length}");
    }
    for round in 0..3000 {
        let mut layer = sound.clone();
        // Index and trailer are what is parsed: the last 8 KiB. Some rounds also cut or replace.
        for _ in 0..1 + random.below(8) {
            let at = layer.len() - 1 - random.below(8192) as usize;
            layer[at] = random.next() as u8;
        }
        if round % 7 == 0 {
            let from = layer.len() - 4096;
            layer[from + 32..from + 56]
                .iter_mut()
                .for_each(|byte| *byte = random.next() as u8);
        }
        let (store, paths) = store_of(&[&layer]);
        if let Ok(stack) = Stack::open(&store, &paths) {
            let mut buffer = vec![0; 1 << 16];
            for offset in (0..16 << 20).step_by(1 << 16) {
                stack.read(offset, &mut buffer).unwrap();
            }
        }
    }
}

#[test]
fn one_file_is_open_once_until_it_is_another_file() {
    let files = MemoryFiles::new();
    let path = Path::new("/layer");
    files.put(path, raw_layer(8, &[], |_| ()));
    let store = LayerStore::new(files.clone());
    let first = store.open(path).unwrap();
    assert!(Arc::ptr_eq(&first, &store.open(path).unwrap()));
    files.put(path, raw_layer(8, &[], |_| ()));
    let second = store.open(path).unwrap();
    assert!(!Arc::ptr_eq(&first, &second) && first.uuid != second.uuid);
}

#[test]
fn a_stack_is_as_large_as_its_topmost_layer_that_says_so() {
    let with_size = |size| raw_layer(8, &[], |trailer| trailer.virtual_size = size);
    let (store, paths) = store_of(&[&with_size(1 << 20), &with_size(2 << 20), &with_size(0)]);
    assert_eq!(Stack::open(&store, &paths).unwrap().virtual_size(), 2 << 20);
    let many = vec![paths[0].clone(); 256];
    assert_eq!(
        Stack::open(&store, &many).err().map(|error| error.code),
        Some(Code::Invalid)
    );
    assert!(Stack::open(&store, &many[..255]).is_ok());
}
