//! Sorted, disjoint extents: laying one index over another, and the map of a writable upper. Pure.

use std::collections::BTreeMap;
use std::ops::Range;

use crate::format::lsmt::{Entry, MAX_RUN};

/// Appends `entry`, joined to the last one where they are neighbours.
pub fn push_joined(out: &mut Vec<Entry>, entry: Entry) {
    match out
        .last_mut()
        .and_then(|last| Some((last.joined(entry)?, last)))
    {
        Some((joined, last)) => *last = joined,
        None => out.push(entry),
    }
}

/// `top` over `below`, both sorted and disjoint; so is the result. Time is linear in both.
pub fn overlay(below: &[Entry], top: &[Entry]) -> Vec<Entry> {
    let mut out = Vec::with_capacity(below.len() + top.len());
    let mut lower = below.iter().copied();
    // What is left of the entry of `below` that reaches furthest so far.
    let mut rest = lower.next();
    for &entry in top {
        while let Some(under) = rest.filter(|under| under.sector() < entry.end()) {
            if under.sector() < entry.sector() {
                push_joined(
                    &mut out,
                    under.slice(under.sector(), under.end().min(entry.sector())),
                );
            }
            if under.end() > entry.end() {
                rest = Some(under.slice(entry.end().max(under.sector()), under.end()));
                break;
            }
            rest = lower.next();
        }
        push_joined(&mut out, entry);
    }
    for under in rest.into_iter().chain(lower) {
        push_joined(&mut out, under);
    }
    out
}

/// One index for a stack, bottom to top, each entry tagged with the number of its layer. Time is n
/// log(layers).
pub fn compose(layers: &[&[Entry]]) -> Vec<Entry> {
    fn part(layers: &[&[Entry]], first: usize) -> Vec<Entry> {
        match layers {
            [] => Vec::new(),
            // At most 255 layers: the number fits the tag.
            [only] => only
                .iter()
                .map(|entry| entry.with_tag(first as u8))
                .collect(),
            _ => {
                let (below, top) = layers.split_at(layers.len() / 2);
                overlay(&part(below, first), &part(top, first + below.len()))
            }
        }
    }
    let mut merged = part(layers, 0);
    merged.shrink_to_fit();
    merged
}

/// The entries of a sorted index that touch `sectors`, uncut.
pub fn touching(index: &[Entry], sectors: &Range<u64>) -> impl Iterator<Item = Entry> {
    let first = index.partition_point(|entry| entry.end() <= sectors.start);
    let end = sectors.end;
    index[first..]
        .iter()
        .copied()
        .take_while(move |entry| entry.sector() < end)
}

/// Where a run of an upper's sectors is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// In the data file from this physical sector on.
    Data(u64),
    Zeroed,
}

/// A part of a queried range: known to the map, or (`None`) decided by what lies below.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Piece {
    pub sectors: Range<u64>,
    pub place: Option<Place>,
}

#[derive(Clone, Copy)]
struct Run {
    end: u64,
    place: Place,
}

impl Place {
    /// The place `by` sectors further on.
    const fn skip(self, by: u64) -> Self {
        match self {
            Self::Data(physical) => Self::Data(physical + by),
            Self::Zeroed => Self::Zeroed,
        }
    }
}

/// What an upper holds: disjoint runs of sectors, by their first sector.
#[derive(Default)]
pub struct ExtentMap {
    runs: BTreeMap<u64, Run>,
}

impl ExtentMap {
    /// Puts `sectors` at `place`, over whatever the map had there.
    pub fn insert(&mut self, sectors: Range<u64>, place: Place) {
        let Range { mut start, mut end } = sectors;
        if start >= end {
            return;
        }
        let mut place = place;
        if let Some((&first, &run)) = self.runs.range(..start).next_back() {
            if run.end > start {
                self.runs.insert(
                    first,
                    Run {
                        end: start,
                        place: run.place,
                    },
                );
                if run.end > end {
                    self.runs.insert(
                        end,
                        Run {
                            end: run.end,
                            place: run.place.skip(end - first),
                        },
                    );
                }
            }
            if run.end >= start && run.place.skip(start - first) == place {
                (start, place) = (first, run.place);
            }
        }
        while let Some((&first, &run)) = self.runs.range(start..end).next() {
            self.runs.remove(&first);
            if run.end > end {
                self.runs.insert(
                    end,
                    Run {
                        end: run.end,
                        place: run.place.skip(end - first),
                    },
                );
            }
        }
        if let Some(&next) = self.runs.get(&end)
            && place.skip(end - start) == next.place
        {
            self.runs.remove(&end);
            end = next.end;
        }
        self.runs.insert(start, Run { end, place });
    }

    /// The pieces of `sectors`, in order and without gaps.
    pub fn pieces(&self, sectors: Range<u64>) -> Vec<Piece> {
        if sectors.is_empty() {
            return Vec::new();
        }
        let before = self
            .runs
            .range(..sectors.start)
            .next_back()
            .filter(|(_, run)| run.end > sectors.start);
        let mut pieces = Vec::with_capacity(1);
        let mut at = sectors.start;
        for (&first, run) in before.into_iter().chain(self.runs.range(sectors.clone())) {
            if first > at {
                pieces.push(Piece {
                    sectors: at..first,
                    place: None,
                });
                at = first;
            }
            let end = run.end.min(sectors.end);
            pieces.push(Piece {
                sectors: at..end,
                place: Some(run.place.skip(at - first)),
            });
            at = end;
        }
        if at < sectors.end {
            pieces.push(Piece {
                sectors: at..sectors.end,
                place: None,
            });
        }
        pieces
    }

    /// As index entries, sorted and disjoint.
    pub fn entries(&self) -> Vec<Entry> {
        let mut entries = Vec::with_capacity(self.runs.len());
        for (&first, run) in &self.runs {
            entries.extend(split(first..run.end, run.place));
        }
        entries
    }

    pub fn is_empty(&self) -> bool {
        self.runs.is_empty()
    }
}

/// A run as entries of at most [`MAX_RUN`] sectors.
pub fn split(sectors: Range<u64>, place: Place) -> impl Iterator<Item = Entry> {
    let Range { start, end } = sectors;
    (start..end).step_by(MAX_RUN as usize).map(move |at| {
        let length = MAX_RUN.min(end - at);
        match place.skip(at - start) {
            Place::Data(physical) => Entry::data(at, length, physical),
            Place::Zeroed => Entry::zeroed(at, length),
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Random;

    const SECTORS: u64 = 64;

    /// Which physical sector each logical one has: 0 none, `u64::MAX` zeroed.
    fn flat(entries: &[Entry]) -> Vec<(u8, u64)> {
        let mut flat = vec![(0, 0); SECTORS as usize];
        let mut last_end = 0;
        for entry in entries {
            assert!(
                entry.length() > 0 && entry.sector() >= last_end,
                "unsorted: {entries:?}"
            );
            last_end = entry.end();
            for sector in entry.sector()..entry.end() {
                let value = if entry.is_zeroed() {
                    u64::MAX
                } else {
                    entry.physical() + sector - entry.sector()
                };
                flat[sector as usize] = (entry.tag(), value);
            }
        }
        flat
    }

    fn random_map(random: &mut Random) -> ExtentMap {
        let mut map = ExtentMap::default();
        for write in 0..random.below(10) {
            let start = random.below(SECTORS);
            let end = (start + 1 + random.below(12)).min(SECTORS);
            let place = if random.below(3) == 0 {
                Place::Zeroed
            } else {
                Place::Data(8 + 100 * write)
            };
            map.insert(start..end, place);
        }
        map
    }

    #[test]
    fn a_map_is_what_was_written_last() {
        let mut random = Random::new(1);
        for _ in 0..2000 {
            let (mut map, mut model) = (ExtentMap::default(), vec![(0, 0); SECTORS as usize]);
            for write in 0..random.below(30) {
                let start = random.below(SECTORS);
                let end = (start + 1 + random.below(12)).min(SECTORS);
                let zeroed = random.below(3) == 0;
                // Half of the writes go right behind the one before, so that runs join.
                let physical = 8 + if random.below(2) == 0 {
                    start
                } else {
                    100 * write
                };
                map.insert(
                    start..end,
                    if zeroed {
                        Place::Zeroed
                    } else {
                        Place::Data(physical)
                    },
                );
                for sector in start..end {
                    model[sector as usize] = (
                        0,
                        if zeroed {
                            u64::MAX
                        } else {
                            physical + sector - start
                        },
                    );
                }
            }
            assert_eq!(flat(&map.entries()), model);
            let from = random.below(SECTORS);
            let to = from + random.below(SECTORS - from);
            let mut at = from;
            for piece in map.pieces(from..to) {
                assert!(piece.sectors.start == at && piece.sectors.end > at);
                at = piece.sectors.end;
                for sector in piece.sectors.clone() {
                    let value = match piece.place {
                        None => 0,
                        Some(Place::Zeroed) => u64::MAX,
                        Some(Place::Data(physical)) => physical + sector - piece.sectors.start,
                    };
                    assert_eq!(value, model[sector as usize].1);
                }
            }
            assert_eq!(at, to);
        }
    }

    #[test]
    fn composing_equals_looking_from_the_top() {
        let mut random = Random::new(2);
        for _ in 0..2000 {
            let layers: Vec<Vec<Entry>> = (0..1 + random.below(6))
                .map(|_| random_map(&mut random).entries())
                .collect();
            let mut model = vec![(0, 0); SECTORS as usize];
            for (number, layer) in layers.iter().enumerate() {
                for (sector, (_, value)) in flat(layer)
                    .into_iter()
                    .enumerate()
                    .filter(|(_, (_, value))| *value != 0)
                {
                    model[sector] = (number as u8, value);
                }
            }
            let slices: Vec<&[Entry]> = layers.iter().map(Vec::as_slice).collect();
            assert_eq!(flat(&compose(&slices)), model);
        }
    }

    #[test]
    fn long_runs_are_split() {
        let entries: Vec<Entry> = split(5..5 + 2 * MAX_RUN + 1, Place::Data(8)).collect();
        assert_eq!(
            entries
                .iter()
                .map(|entry| entry.length())
                .collect::<Vec<_>>(),
            [MAX_RUN, MAX_RUN, 1]
        );
        assert_eq!(entries[2].physical(), 8 + 2 * MAX_RUN);
    }
}
