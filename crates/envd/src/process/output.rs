//! What a process writes, handed to whoever listens at that moment.
//!
//! A listener has a queue of `QUEUE_CHUNKS` chunks (1 MiB of output at most). While a queue is full its process is not read from, and so
//! in the end waits: that is back-pressure. A listener that takes nothing for `PATIENCE` is given up: its stream ends with an
//! error, and the process goes on for the others. With no listener, output is dropped.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::mpsc::error::TrySendError;
use tokio::sync::mpsc::{Receiver, Sender, channel};
use tokio::sync::watch;
use tokio::time::{Instant, timeout_at};

pub const PATIENCE: Duration = Duration::from_secs(30);
const QUEUE_CHUNKS: usize = 32;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Source {
    Stdout,
    Stderr,
    Terminal,
}

/// How a process ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct End {
    pub exit: Exit,
    /// Its Start's deadline passed, which killed it.
    pub timed_out: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Exit {
    Code(i32),
    Signal(i32),
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    Data(Source, Bytes),
    /// The last one.
    End(End),
}

/// Events of one process. A receiver that ends without `Event::End` was cut off.
#[derive(Default)]
pub struct Output {
    listeners: Mutex<Vec<Sender<Event>>>,
    /// Held while one event is handed out, so that all listeners see the same order.
    turn: tokio::sync::Mutex<()>,
    /// How often all listeners were given up.
    cuts: watch::Sender<u64>,
}

impl Output {
    /// From now on.
    pub fn listen(&self) -> Receiver<Event> {
        let (sender, receiver) = channel(QUEUE_CHUNKS);
        self.listeners().push(sender);
        receiver
    }

    /// Hands `event` to every listener; returns when each has it in its queue or was given up.
    pub async fn publish(&self, event: Event) {
        let _turn = self.turn.lock().await;
        let mut cuts = self.cuts.subscribe();
        let listeners = self.listeners().clone();
        let deadline = Instant::now() + PATIENCE;
        for listener in listeners {
            let delivered = match listener.try_send(event.clone()) {
                Ok(()) => true,
                Err(TrySendError::Closed(_)) => false,
                Err(TrySendError::Full(event)) => tokio::select! {
                    sent = timeout_at(deadline, listener.send(event)) => matches!(sent, Ok(Ok(()))),
                    _ = cuts.changed() => return,
                },
            };
            if !delivered {
                self.listeners()
                    .retain(|other| !other.same_channel(&listener));
            }
        }
    }

    /// Gives up all listeners.
    pub fn cut(&self) {
        self.listeners().clear();
        self.cuts.send_modify(|cuts| *cuts += 1);
    }

    fn listeners(&self) -> std::sync::MutexGuard<'_, Vec<Sender<Event>>> {
        self.listeners
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

/// The events of a process that has ended already.
pub fn already_over(end: End) -> Receiver<Event> {
    let (sender, receiver) = channel(1);
    // There is room for one, and the receiver is right here.
    let _ = sender.try_send(Event::End(end));
    receiver
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chunk(byte: u8) -> Event {
        Event::Data(Source::Stdout, Bytes::copy_from_slice(&[byte]))
    }

    #[tokio::test(start_paused = true)]
    async fn a_dead_reader_delays_the_others_only_for_so_long() {
        let output = Output::default();
        let (dead, mut alive) = (output.listen(), output.listen());
        let reading = tokio::spawn(async move {
            let mut seen = 0;
            while alive
                .recv()
                .await
                .is_some_and(|event| !matches!(event, Event::End(_)))
            {
                seen += 1;
            }
            seen
        });
        let started = Instant::now();
        for byte in 0..100 {
            output.publish(chunk(byte)).await;
        }
        output
            .publish(Event::End(End {
                exit: Exit::Code(0),
                timed_out: false,
            }))
            .await;
        assert_eq!(reading.await.unwrap(), 100);
        assert_eq!(started.elapsed(), PATIENCE);
        drop(dead);
    }

    #[tokio::test(start_paused = true)]
    async fn a_slow_reader_gets_everything() {
        let output = Output::default();
        let mut slow = output.listen();
        let reading = tokio::spawn(async move {
            let mut seen = Vec::new();
            while let Some(Event::Data(_, data)) = slow.recv().await {
                seen.push(data[0]);
                tokio::time::sleep(PATIENCE / 2).await;
            }
            seen
        });
        for byte in 0..100 {
            output.publish(chunk(byte)).await;
        }
        drop(output);
        assert_eq!(reading.await.unwrap(), (0..100).collect::<Vec<u8>>());
    }

    #[tokio::test(start_paused = true)]
    async fn nobody_listening_costs_nothing() {
        let output = Output::default();
        let started = Instant::now();
        drop(output.listen());
        output.publish(chunk(1)).await;
        assert_eq!(started.elapsed(), Duration::ZERO);
    }

    #[tokio::test(start_paused = true)]
    async fn cutting_frees_a_waiting_process_at_once() {
        let output = std::sync::Arc::new(Output::default());
        let mut dead = output.listen();
        let publishing = tokio::spawn({
            let output = output.clone();
            async move {
                for byte in 0..200 {
                    output.publish(chunk(byte)).await;
                }
            }
        });
        tokio::time::sleep(Duration::from_secs(1)).await;
        output.cut();
        let started = Instant::now();
        publishing.await.unwrap();
        assert!(
            started.elapsed() < Duration::from_secs(1),
            "{:?}",
            started.elapsed()
        );
        while let Some(event) = dead.recv().await {
            assert!(matches!(event, Event::Data(..)));
        }
    }
}
