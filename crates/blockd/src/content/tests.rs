//! Wrapped files of another writer, of the tests, and damaged ones.

use std::io::ErrorKind;
use std::path::Path;
use std::sync::Arc;

use super::unwrap;
use crate::backend::{Blob, Files, Mode};
use crate::format::crc;
use crate::format::zfile::{Compression, Header, block_crc};
use crate::testing::{MemoryFiles, Random, golden};

const COMPRESSIONS: [Compression; 2] = [Compression::Lz4, Compression::Zstd];

fn blob(bytes: Vec<u8>) -> Arc<dyn Blob> {
    let files = MemoryFiles::new();
    files.put(Path::new("/file"), bytes);
    files.open(Path::new("/file"), Mode::Read).unwrap()
}

/// Half of it compresses.
fn content(length: usize) -> Vec<u8> {
    let mut random = Random::new(length as u64);
    (0..length)
        .map(|at| {
            let noise = random.next() as u8;
            if at % 8192 < 4096 { noise } else { noise & 1 }
        })
        .collect()
}

fn zfile(content: &[u8], block_size: u32, compression: Compression) -> Vec<u8> {
    let mut header = Header::new(block_size, compression);
    let mut file = header.encode().to_vec();
    let mut index = Vec::new();
    for block in content.chunks(block_size as usize) {
        let mut compressed = match compression {
            Compression::Lz4 => lz4_flex::block::compress(block),
            Compression::Zstd => zstd::bulk::compress(block, 3).unwrap(),
        };
        let crc = block_crc(&compressed);
        compressed.extend_from_slice(&crc.to_le_bytes());
        index.extend_from_slice(&(compressed.len() as u32).to_le_bytes());
        file.extend_from_slice(&compressed);
    }
    header.index_offset = file.len() as u64;
    header.index_size = index.len() as u64 / 4;
    header.original_size = content.len() as u64;
    header.index_crc = Some(crc::raw(0, &index));
    file.extend_from_slice(&index);
    file.extend_from_slice(&header.trailer().encode());
    file
}

fn all(blob: &dyn Blob) -> Vec<u8> {
    let mut bytes = vec![0; blob.len().unwrap() as usize];
    blob.read_at(&mut bytes, 0).unwrap();
    bytes
}

#[test]
fn golden_wrappings_hold_the_layer() {
    let layer = golden("l1.lsmt").unwrap();
    for name in [
        "l1.lsmt",
        "l1.tar",
        "l1.zfile.lz4",
        "l1.zfile.lz4.tar",
        "l1.zfile.zstd",
    ] {
        // All but the first may be too large to commit.
        if let Some(file) = golden(name) {
            assert!(all(&*unwrap(blob(file)).unwrap()) == layer, "{name}");
        }
    }
}

#[test]
fn any_part_reads_as_it_was_written() {
    let mut random = Random::new(5);
    for compression in COMPRESSIONS {
        for (length, block_size) in [
            (1, 512),
            (4096, 4096),
            (300_001, 4096),
            (300_001, 512),
            (1_000_000, 65_536),
        ] {
            let content = content(length);
            let opened = unwrap(blob(zfile(&content, block_size, compression))).unwrap();
            assert!(all(&*opened) == content);
            for _ in 0..200 {
                let start = random.below(length as u64) as usize;
                let end = start + random.below(70_000) as usize;
                let end = end.min(length);
                let mut part = vec![0; end - start];
                opened.read_at(&mut part, start as u64).unwrap();
                assert!(part == content[start..end]);
            }
            let past = opened.read_at(&mut [0; 2], length as u64 - 1).unwrap_err();
            assert_eq!(past.kind(), ErrorKind::UnexpectedEof);
        }
    }
}

/// What is wrong with a file, if it is found out; a file that opens reads without panic.
fn judge(file: Vec<u8>) -> Option<String> {
    let named = |error: std::io::Error| {
        assert!(
            matches!(
                error.kind(),
                ErrorKind::InvalidData | ErrorKind::UnexpectedEof
            ),
            "{error}"
        );
        error.to_string()
    };
    let opened = match unwrap(blob(file)) {
        Ok(opened) => opened,
        Err(error) => return Some(named(error)),
    };
    let length = opened.len().unwrap();
    assert!(length < 1 << 24, "it is believed to have {length} bytes");
    let mut bytes = vec![0; length as usize];
    opened.read_at(&mut bytes, 0).err().map(named)
}

#[test]
fn damage_is_named_and_never_panics() {
    let mut random = Random::new(6);
    for compression in COMPRESSIONS {
        let sound = zfile(&content(100_000), 4096, compression);
        for length in (24..sound.len()).step_by(487) {
            if length >= 512 {
                assert!(judge(sound[..length].to_vec()).is_some(), "cut to {length}");
            }
        }
        for _ in 0..2000 {
            let mut file = sound.clone();
            // Behind the magic, which decides whether it is a zfile at all.
            let at = 24 + random.below(file.len() as u64 - 24) as usize;
            let flipped = 1 << random.below(8);
            file[at] ^= flipped;
            let found = judge(file);
            assert!(found.is_some_and(|why| why.contains(" at ")), "at {at}");
        }
    }
}

#[test]
fn lies_with_right_checksums_are_refused() {
    for compression in COMPRESSIONS {
        let sound = zfile(&content(100_000), 4096, compression);
        let trailer_at = sound.len() - 512;
        let trailer: [u8; 512] = sound[trailer_at..].try_into().unwrap();
        let trailer = Header::decode(&trailer, false).unwrap();
        let lies: [fn(&mut Header); 8] = [
            |header| header.index_size = u64::MAX,
            |header| (header.index_size, header.original_size) = (1 << 60, u64::MAX),
            |header| (header.index_size, header.original_size) = (1 << 40, 1 << 52),
            |header| (header.index_size, header.original_size) = (0, 0),
            |header| header.index_offset = u64::MAX,
            |header| header.index_offset = 0,
            |header| header.original_size -= 4096,
            |header| header.index_crc = Some(7),
        ];
        for lie in lies {
            let mut header = trailer;
            lie(&mut header);
            let mut file = sound.clone();
            file[trailer_at..].copy_from_slice(&header.encode());
            assert!(judge(file).is_some(), "{header:?}");
        }
        // Blocks and jump table changed, their CRCs made right again.
        let mut random = Random::new(7);
        for _ in 0..1000 {
            let mut file = sound.clone();
            let index = trailer.index_offset as usize;
            if random.below(2) == 0 {
                let at = index + random.below((trailer_at - index) as u64) as usize;
                file[at] = random.next() as u8;
            } else {
                let first = u32::from_le_bytes(file[index..index + 4].try_into().unwrap());
                let crc_at = 512 + first as usize - 4;
                for _ in 0..4 {
                    let at = 512 + random.below(u64::from(first) - 4) as usize;
                    file[at] = random.next() as u8;
                }
                let crc = block_crc(&file[512..crc_at]);
                file[crc_at..crc_at + 4].copy_from_slice(&crc.to_le_bytes());
            }
            let mut header = trailer;
            header.index_crc = Some(crc::raw(0, &file[index..trailer_at]));
            file[trailer_at..].copy_from_slice(&header.encode());
            judge(file);
        }
    }
}

/// As docs/formats/tar.md describes it.
fn tar(payload: &[u8]) -> Vec<u8> {
    let header = |kind: u8, size: usize| {
        let mut block = [0; 512];
        block[124..136].copy_from_slice(format!("{size:011o} ").as_bytes());
        block[148..156].fill(b' ');
        block[156] = kind;
        block[257..265].copy_from_slice(b"ustar\x0000");
        let sum: u32 = block.iter().map(|byte| u32::from(*byte)).sum();
        block[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
        block
    };
    let record = format!("size={}\n", payload.len());
    let length = (1..)
        .find(|length| format!("{length} {record}").len() == *length)
        .unwrap();
    let mut file = header(b'x', length).to_vec();
    file.extend_from_slice(format!("{length} {record}").as_bytes());
    file.resize(1024, 0);
    file.extend_from_slice(&header(b'0', 0));
    file.extend_from_slice(payload);
    file.resize(file.len().next_multiple_of(512) + 1024, 0);
    file
}

#[test]
fn tar_gives_its_payload_or_says_what_is_wrong() {
    let content = content(50_000);
    let sound = tar(&zfile(&content, 4096, Compression::Lz4));
    assert!(all(&*unwrap(blob(sound.clone())).unwrap()) == content);
    assert!(judge(sound[..20_000].to_vec()).is_some_and(|why| why.contains("cut off")));
    let mut random = Random::new(8);
    for _ in 0..2000 {
        let mut file = sound.clone();
        for _ in 0..1 + random.below(3) {
            file[512 + random.below(1024) as usize] = random.next() as u8;
        }
        judge(file);
    }
}
