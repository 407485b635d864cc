//! Generates messages and service traits from proto/*.proto. The files are compiled by a pure-Rust compiler, so no `protoc` is needed.

use std::error::Error;
use std::path::PathBuf;

use protox::prost::Message;

const FILES: [&str; 2] = ["process.proto", "filesystem.proto"];

fn main() -> Result<(), Box<dyn Error>> {
    let include = PathBuf::from(std::env::var("CARGO_MANIFEST_DIR")?).join("../../proto");
    println!("cargo::rerun-if-changed={}", include.display());
    let descriptors = PathBuf::from(std::env::var("OUT_DIR")?).join("descriptors.bin");
    std::fs::write(
        &descriptors,
        protox::compile(FILES, [&include])?.encode_to_vec(),
    )?;
    connectrpc_build::Config::new()
        .descriptor_set(&descriptors)
        .files(&FILES)
        // It would watch `descriptors`, which is younger than this run of the script: changed for ever.
        .emit_rerun_directives(false)
        .include_file("connect.rs")
        .compile()?;
    Ok(())
}
