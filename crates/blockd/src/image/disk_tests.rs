//! A disk against a flat array of bytes, under failures, crashes and power loss.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::error::Code;
use crate::image::disk::Disk;
use crate::layer::sealed::LayerStore;
use crate::layer::stack::Stack;
use crate::testing::{MemoryFiles, Random, golden, golden_image};

const SIZE: usize = 64 << 10;
const UPPER: &str = "/upper";

/// A disk, what it must hold, and the layers it was sealed into.
struct Bench {
    files: Arc<MemoryFiles>,
    store: LayerStore,
    disk: Disk,
    model: Vec<u8>,
    layers: Vec<PathBuf>,
}

impl Bench {
    fn new() -> Self {
        let files = MemoryFiles::new();
        let store = LayerStore::new(files.clone());
        let disk = open(&store, &[]).unwrap();
        Self {
            files,
            store,
            disk,
            model: vec![0; SIZE],
            layers: Vec::new(),
        }
    }

    /// As another process would: nothing but the files is left.
    fn reopen(&mut self) {
        self.store = LayerStore::new(self.files.clone());
        self.disk = open(&self.store, &self.layers).unwrap();
    }

    fn write(&mut self, random: &mut Random) {
        let (start, end) = range(random);
        let data: Vec<u8> = (start..end).map(|_| random.next() as u8).collect();
        if self
            .disk
            .write(&self.disk.gate(), start as u64, &data)
            .is_ok()
        {
            self.model[start..end].copy_from_slice(&data);
        }
    }

    fn discard(&mut self, random: &mut Random) {
        let (start, end) = range(random);
        if self
            .disk
            .zero(&self.disk.gate(), start as u64, (end - start) as u64)
            .is_ok()
        {
            self.model[start..end].fill(0);
        }
    }

    fn seal(&mut self) -> Result<(), Code> {
        let layer = PathBuf::from(format!("/layer{}", self.layers.len()));
        self.disk
            .seal(&self.store, &layer)
            .map_err(|error| error.code)?;
        self.layers.push(layer);
        Ok(())
    }

    fn check(&self, what: impl std::fmt::Display) {
        assert!(read(&self.disk) == self.model, "{what}");
    }
}

fn open(store: &LayerStore, layers: &[PathBuf]) -> crate::error::Result<Disk> {
    Disk::open(
        store,
        Stack::open(store, layers)?,
        Path::new(UPPER),
        SIZE as u64,
    )
}

fn read(disk: &Disk) -> Vec<u8> {
    let mut content = vec![0xaa; SIZE];
    disk.read(0, &mut content).unwrap();
    content
}

fn range(random: &mut Random) -> (usize, usize) {
    let sectors = SIZE as u64 / 512;
    let start = random.below(sectors);
    let end = (start + 1 + random.below(16)).min(sectors);
    (start as usize * 512, end as usize * 512)
}

#[test]
fn a_disk_holds_what_was_written_last() {
    for seed in 0..60 {
        let random = &mut Random::new(seed);
        let mut bench = Bench::new();
        for step in 0..150 {
            match random.below(20) {
                0..12 => bench.write(random),
                12..16 => bench.discard(random),
                16 => bench.disk.flush().unwrap(),
                17 => bench.seal().unwrap(),
                18 => bench.reopen(),
                _ => {
                    let (start, end) = range(random);
                    let mut part = vec![0; end - start];
                    bench.disk.read(start as u64, &mut part).unwrap();
                    assert!(part == bench.model[start..end]);
                }
            }
            bench.check(format!("seed {seed} step {step}"));
        }
    }
}

#[test]
fn ten_layers_each_store_what_changed_and_stay_exact() {
    let random = &mut Random::new(7);
    let mut bench = Bench::new();
    let mut states = Vec::new();
    for _ in 0..10 {
        let before = bench.model.clone();
        for _ in 0..3 {
            bench.write(random);
        }
        let changed = before
            .chunks(512)
            .zip(bench.model.chunks(512))
            .filter(|(old, new)| old != new)
            .count()
            * 512;
        bench.seal().unwrap();
        let sealed = bench.store.open(bench.layers.last().unwrap()).unwrap();
        assert_eq!(sealed.live_bytes(), changed as u64);
        states.push(bench.model.clone());
    }
    for (count, state) in states.iter().enumerate() {
        let stack = Stack::open(&bench.store, &bench.layers[..=count]).unwrap();
        let mut content = vec![0; SIZE];
        stack.read(0, &mut content).unwrap();
        assert!(content == *state, "after {} layers", count + 1);
    }
}

#[test]
fn refused_io_changes_nothing() {
    let bench = Bench::new();
    let gate = bench.disk.gate();
    for (offset, length) in [
        (1, 512),
        (0, 511),
        (SIZE as u64, 512),
        (u64::MAX - 511, 1024),
    ] {
        assert_eq!(
            bench
                .disk
                .write(&gate, offset, &vec![1; length])
                .unwrap_err()
                .code,
            Code::Invalid
        );
        assert_eq!(
            bench
                .disk
                .zero(&gate, offset, length as u64)
                .unwrap_err()
                .code,
            Code::Invalid
        );
        assert_eq!(
            bench
                .disk
                .read(offset, &mut vec![1; length])
                .unwrap_err()
                .code,
            Code::Invalid
        );
    }
    bench.check("after refused I/O");
}

#[test]
fn a_seal_that_fails_is_undone_or_terminal_and_never_loses_a_write() {
    let mut terminal = 0;
    for step in 1.. {
        let random = &mut Random::new(step);
        let mut bench = Bench::new();
        for _ in 0..20 {
            bench.write(random);
        }
        bench.seal().unwrap();
        for _ in 0..20 {
            bench.write(random);
            bench.discard(random);
        }
        bench.files.fail_at(step);
        let sealed = bench.seal();
        if !bench.files.has_failed() {
            bench.files.fail_at(0);
            assert!(sealed.is_ok());
            // Every step failed once, and some were past the point of no return.
            assert!(
                step > 6 && terminal == 2,
                "{step} steps, {terminal} terminal"
            );
            return;
        }
        match sealed {
            Ok(()) => bench.check(format!("step {step}: tidying up failed")),
            Err(Code::Terminal) => {
                terminal += 1;
                assert!(bench.disk.failed().is_some());
                assert_eq!(
                    bench.disk.read(0, &mut [0; 512]).unwrap_err().code,
                    Code::Terminal
                );
                // The layer is there, and opening the upper on it finishes the work.
                bench.layers.push("/layer1".into());
            }
            Err(_) => {
                bench.check(format!("step {step}: undone"));
                bench.write(random);
                bench.check(format!("step {step}: goes on"));
                bench.seal().unwrap();
                bench.check(format!("step {step}: seals at the second try"));
            }
        }
        bench.reopen();
        bench.check(format!("step {step}: reopened"));
        let leftovers = bench
            .files
            .names()
            .into_iter()
            .filter(|name| name.to_string_lossy().contains("next"))
            .count();
        assert_eq!(leftovers, 0);
    }
}

#[test]
fn a_crash_during_a_seal_leaves_the_old_upper_or_the_new_one() {
    for step in 1.. {
        let random = &mut Random::new(step);
        let mut bench = Bench::new();
        for _ in 0..20 {
            bench.write(random);
        }
        bench.files.fail_at(step);
        let sealed = bench.seal();
        let failed = bench.files.has_failed();
        // From here on only the files count: the process is gone, whatever it would still have
        // tidied up.
        bench.files.fail_at(0);
        bench.layers = if bench.files.names().contains(&"/layer0".into()) {
            vec!["/layer0".into()]
        } else {
            vec![]
        };
        bench.reopen();
        bench.check(format!("step {step}"));
        if !failed {
            assert!(sealed.is_ok());
            return;
        }
    }
}

#[test]
fn an_upper_is_refused_on_a_stack_it_does_not_continue() {
    let random = &mut Random::new(1);
    let mut bench = Bench::new();
    bench.write(random);
    bench.seal().unwrap();
    let error = open(&bench.store, &[]).err().unwrap();
    assert_eq!(error.code, Code::Conflict);
    assert!(error.hint.contains("sealed layer on top"));
}

#[test]
fn an_upper_grows_and_never_shrinks_and_a_failure_leaves_either_size() {
    let grown = 2 * SIZE as u64;
    let open = |bench: &Bench, size| {
        let stack = Stack::open(&bench.store, &bench.layers)?;
        Disk::open(&bench.store, stack, Path::new(UPPER), size)
    };
    for step in 1.. {
        let random = &mut Random::new(step);
        let mut bench = Bench::new();
        bench.write(random);
        bench.seal().unwrap();
        bench.write(random);
        bench.disk.close();
        bench.files.fail_at(step);
        let first = open(&bench, grown);
        let failed = bench.files.has_failed();
        bench.files.fail_at(0);
        assert_eq!(first.is_err(), failed, "step {step}");
        drop(first);
        let size = open(&bench, 0).unwrap().size();
        assert!(size == grown || (failed && size == SIZE as u64));
        bench.disk = open(&bench, grown).unwrap();
        let mut content = vec![0xaa; 2 * SIZE];
        bench.disk.read(0, &mut content).unwrap();
        assert!(content[..SIZE] == bench.model && content[SIZE..].iter().all(|&byte| byte == 0));
        let gate = bench.disk.gate();
        bench.disk.write(&gate, grown - 512, &[7; 512]).unwrap();
        drop(gate);
        bench.seal().unwrap();
        assert_eq!(
            bench.store.open(&bench.layers[1]).unwrap().virtual_size,
            grown
        );
        bench.disk.close();
        assert_eq!(
            open(&bench, SIZE as u64).err().unwrap().code,
            Code::Conflict
        );
        if !failed {
            return;
        }
    }
}

#[test]
fn sealing_again_for_the_same_path_answers_the_same_until_something_is_written() {
    let random = &mut Random::new(1);
    let mut bench = Bench::new();
    bench.write(random);
    let first = bench.disk.seal(&bench.store, Path::new("/layer")).unwrap();
    let again = bench.disk.seal(&bench.store, Path::new("/layer")).unwrap();
    assert_eq!(
        (first.uuid, first.size_bytes),
        (again.uuid, again.size_bytes)
    );
    bench.write(random);
    assert_eq!(
        bench
            .disk
            .seal(&bench.store, Path::new("/layer"))
            .err()
            .unwrap()
            .code,
        Code::Conflict
    );
    bench.check("after a refused seal");
}

#[test]
fn failed_writes_leave_what_was_there() {
    for seed in 0..200 {
        let random = &mut Random::new(seed);
        let mut bench = Bench::new();
        for _ in 0..10 {
            bench.write(random);
        }
        bench.files.fail_at(1 + random.below(4));
        for _ in 0..4 {
            bench.write(random);
            bench.discard(random);
        }
        bench.files.fail_at(0);
        bench.check(format!("seed {seed}"));
        bench.reopen();
        bench.check(format!("seed {seed}, reopened"));
    }
}

#[test]
fn a_torn_entry_at_the_end_is_cut_off() {
    let random = &mut Random::new(5);
    let mut bench = Bench::new();
    for _ in 0..5 {
        bench.write(random);
    }
    let index = Path::new("/upper/upper.index");
    let mut bytes = bench.files.bytes(index);
    bytes.extend_from_slice(&[0xff; 9]);
    bench.files.put(index, bytes);
    bench.reopen();
    bench.check("torn tail");
    bench.write(random);
    bench.reopen();
    bench.check("written after a torn tail");
}

#[test]
fn after_power_loss_the_disk_holds_what_was_flushed() {
    for seed in 0..300 {
        let random = &mut Random::new(seed);
        let mut bench = Bench::new();
        for round in 0..4 {
            for _ in 0..random.below(10) {
                bench.write(random);
                bench.discard(random);
            }
            if random.below(3) == 0 {
                bench.seal().unwrap();
            }
            bench.disk.flush().unwrap();
            let flushed = bench.model.clone();
            for _ in 0..random.below(10) {
                bench.write(random);
            }
            bench.files.lose_power(random);
            bench.reopen();
            bench.model.clone_from(&flushed);
            bench.check(format!("seed {seed} round {round}"));
            // A crash of the process alone loses nothing, in the new boot as well.
            bench.write(random);
            bench.reopen();
            bench.check(format!("seed {seed} round {round}: crash in the new boot"));
            if random.below(2) == 0 {
                // But it makes nothing durable either.
                bench.files.lose_power(random);
                bench.reopen();
                bench.model.clone_from(&flushed);
                bench.check(format!(
                    "seed {seed} round {round}: power lost after a crash"
                ));
            }
        }
    }
}

#[test]
fn an_upper_never_flushed_before_power_loss_is_made_anew() {
    for seed in 0..100 {
        let random = &mut Random::new(seed);
        let mut bench = Bench::new();
        bench.write(random);
        bench.files.lose_power(random);
        bench.model.fill(0);
        bench.reopen();
        bench.check(format!("seed {seed}"));
    }
}

#[test]
fn a_failed_flush_is_final() {
    let random = &mut Random::new(1);
    let mut bench = Bench::new();
    bench.write(random);
    bench.files.fail_syncs();
    assert_eq!(bench.disk.flush().unwrap_err().code, Code::Io);
    assert_eq!(bench.disk.flush().unwrap_err().code, Code::Terminal);
    assert_eq!(
        bench
            .disk
            .write(&bench.disk.gate(), 0, &[0; 512])
            .unwrap_err()
            .code,
        Code::Terminal
    );
}

#[test]
fn reads_are_exact_while_others_write_and_seal() {
    let bench = Bench::new();
    let done = std::sync::atomic::AtomicBool::new(false);
    let half = SIZE / 2;
    let still = vec![0x5a; half];
    bench
        .disk
        .write(&bench.disk.gate(), half as u64, &still)
        .unwrap();
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                let mut content = vec![0; SIZE];
                while !done.load(std::sync::atomic::Ordering::Relaxed) {
                    bench.disk.read(0, &mut content).unwrap();
                    assert!(content[half..] == still[..]);
                    // Writers write one value a block: a block is never torn between two of them by
                    // a seal.
                    assert!(
                        content[..half]
                            .chunks(512)
                            .all(|block| block.iter().all(|byte| *byte == block[0]))
                    );
                }
            });
        }
        scope.spawn(|| {
            let random = &mut Random::new(9);
            for round in 0..3000 {
                let block = vec![random.next() as u8; 512];
                let offset = random.below(half as u64 / 512) * 512;
                bench
                    .disk
                    .write(&bench.disk.gate(), offset, &block)
                    .unwrap();
                if round % 100 == 0 {
                    let layer = PathBuf::from(format!("/concurrent{round}"));
                    bench.disk.seal(&bench.store, &layer).unwrap();
                }
            }
            done.store(true, std::sync::atomic::Ordering::Relaxed);
        });
    });
}

#[test]
fn uppers_of_another_implementation_are_read_and_sealed() {
    let files = MemoryFiles::new();
    let (base, directory) = (PathBuf::from("/l1"), Path::new("/foreign"));
    files.put(&base, golden("l1.lsmt").unwrap());
    for kind in ["data", "index"] {
        files.put(
            &directory.join(format!("upper.{kind}")),
            golden(&format!("l2.rw.{kind}")).unwrap(),
        );
    }
    let store = LayerStore::new(files.clone());
    let disk = Disk::open(
        &store,
        Stack::open(&store, std::slice::from_ref(&base)).unwrap(),
        directory,
        0,
    )
    .unwrap();
    let expected = golden_image(&["l1", "l2"]);
    let mut content = vec![0; expected.len()];
    disk.read(0, &mut content).unwrap();
    assert!(content == expected);
    disk.seal(&store, Path::new("/l2")).unwrap();
    let fresh = LayerStore::new(files);
    Stack::open(&fresh, &[base, "/l2".into()])
        .unwrap()
        .read(0, &mut content)
        .unwrap();
    assert!(content == expected);
}
