//! Layers written by another implementation, and what they hold. The files are in tests/golden of
//! the repository; AENV_GOLDEN names a directory with more of them.

use std::path::PathBuf;

use super::mix;

const SIZE: usize = 16 << 20;

/// A golden file's bytes; None when it is not there (only the larger ones may be missing).
pub fn golden(name: &str) -> Option<Vec<u8>> {
    let committed = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/golden"));
    let more = std::env::var_os("AENV_GOLDEN").map(PathBuf::from);
    [Some(committed), more]
        .into_iter()
        .flatten()
        .find_map(|directory| std::fs::read(directory.join(name)).ok())
}

/// The image that the operations of `names` (l1, l2) make, one after the other.
pub fn golden_image(names: &[&str]) -> Vec<u8> {
    let operations: serde_json::Value =
        serde_json::from_slice(&golden("ops.json").expect("ops.json is committed"))
            .expect("ops.json is JSON");
    let mut image = vec![0; SIZE];
    for name in names {
        for operation in operations[name]["ops"]
            .as_array()
            .expect("a list of operations")
        {
            let number = |field: &str| operation[field].as_u64().unwrap_or(0);
            let (offset, length) = (number("off") as usize, number("len") as usize);
            let target = &mut image[offset..offset + length];
            match operation["op"].as_str() {
                Some("write") => fill(
                    target,
                    offset as u64,
                    operation["fill"].as_str(),
                    number("arg"),
                ),
                Some("discard") => target.fill(0),
                other => panic!("operation {other:?}"),
            }
        }
    }
    image
}

fn fill(target: &mut [u8], offset: u64, pattern: Option<&str>, seed: u64) {
    for (index, word) in target.chunks_mut(8).enumerate() {
        let w = offset / 8 + index as u64;
        let value = match pattern {
            Some("const") => seed * 0x0101_0101_0101_0101,
            Some("ctr") => (seed << 40) ^ w,
            Some("rnd") => mix(((seed << 40).wrapping_add(w)).wrapping_mul(0x9e37_79b9_7f4a_7c15)),
            other => panic!("pattern {other:?}"),
        };
        word.copy_from_slice(&value.to_le_bytes());
    }
}
