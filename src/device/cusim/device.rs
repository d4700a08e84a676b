//! The thread that simulates the device. It executes the operations of each stream in order, and interleaves
//! the streams at random.

use std::collections::{HashSet, VecDeque};
use std::sync::{Arc, mpsc};

use super::launch::Running;
use super::{Argument, Launch, SimError};
use crate::device::cuda::{DriverError, LaunchShape};
use crate::mem::SplitMix64;

#[derive(Clone, Debug)]
pub(crate) enum Operation {
    Kernel { name: &'static str, shape: LaunchShape, argument: Arc<Argument> },
    Copy { from: u64, to: u64, bytes: usize },
    Record(u64),
    Follow(u64),
}

pub(crate) type Reply = mpsc::Sender<Result<bool, DriverError>>;

pub(crate) enum Command {
    Enqueue { stream: u64, operation: Operation },
    Fired(u64, Reply),
    Wait(u64, Reply),
}

/// The state of the device's thread.
#[derive(Default)]
pub(crate) struct Device {
    seed: u64,
    draws: SplitMix64,
    /// By stream: its name, its pending operations, and the kernel that it is running.
    streams: Vec<(u64, VecDeque<Operation>, Option<Running>)>,
    /// The index of a paused stream, and the remaining steps of its pause. The stream continues earlier if no
    /// other stream can advance.
    frozen: (usize, u64),
    fired: HashSet<u64>,
    failure: Option<DriverError>,
}

impl Device {
    pub(crate) fn new(seed: u64) -> Self {
        Self { seed, draws: SplitMix64::new(seed), ..Self::default() }
    }

    /// Receives commands. While a caller waits for an event, it takes steps, and receives commands between
    /// them, so that new operations overlap with those that the caller waits for.
    pub(crate) fn serve(&mut self, commands: &mpsc::Receiver<Command>) {
        let mut waiting: Vec<(u64, Reply)> = Vec::new();
        loop {
            let command = if waiting.is_empty() {
                commands.recv().map_err(|_| mpsc::TryRecvError::Disconnected)
            } else {
                commands.try_recv()
            };
            match command {
                Ok(Command::Enqueue { stream, operation }) => self.queue(stream).push_back(operation),
                Ok(Command::Fired(event, reply)) => {
                    for _ in 0..self.draw(8) {
                        self.step();
                    }
                    let _ = reply.send(self.answer(event));
                }
                Ok(Command::Wait(event, reply)) => waiting.push((event, reply)),
                Err(mpsc::TryRecvError::Disconnected) => return,
                Err(mpsc::TryRecvError::Empty) => {
                    if !self.step() && self.failure.is_none() {
                        self.failure = Some(stopped("streams", "all wait for an event that never fires"));
                    }
                }
            }
            waiting.retain(|(event, reply)| match self.answer(*event) {
                Ok(false) => true,
                answer => {
                    // The receiver may have been dropped.
                    let _ = reply.send(answer);
                    false
                }
            });
        }
    }

    /// Whether an event has fired; an error once the device has failed.
    fn answer(&self, event: u64) -> Result<bool, DriverError> {
        self.failure.clone().map_or(Ok(self.fired.contains(&event)), Err)
    }

    fn queue(&mut self, stream: u64) -> &mut VecDeque<Operation> {
        let place = self.streams.iter().position(|(name, ..)| *name == stream).unwrap_or_else(|| {
            self.streams.push((stream, VecDeque::new(), None));
            self.streams.len() - 1
        });
        &mut self.streams[place].1
    }

    /// A random number below `limit`; always 0 with seed 0.
    fn draw(&mut self, limit: u64) -> u64 {
        if self.seed == 0 {
            return 0;
        }
        self.draws.next_u64() % limit
    }

    /// Advances one stream. Returns false if none could.
    fn step(&mut self) -> bool {
        let can_go = |(_, queue, _): &(u64, VecDeque<Operation>, Option<Running>)| match queue.front() {
            None => false,
            Some(Operation::Follow(event)) => self.fired.contains(event),
            Some(_) => true,
        };
        let mut ready: Vec<usize> = (0..self.streams.len()).filter(|&i| can_go(&self.streams[i])).collect();
        if ready.is_empty() || self.failure.is_some() {
            return false;
        }
        if self.frozen.1 > 0 && ready.iter().any(|stream| *stream != self.frozen.0) {
            ready.retain(|stream| *stream != self.frozen.0);
            self.frozen.1 -= 1;
        }
        let stream = ready[self.draw(ready.len() as u64) as usize];
        if self.frozen.1 == 0 && self.draw(32) == 1 {
            self.frozen = (stream, 1 << self.draw(10));
        }
        match self.advance(stream) {
            Ok(true) => drop(self.streams[stream].1.pop_front()),
            Ok(false) => {}
            Err(SimError { kernel, reason }) => {
                self.failure = Some(DriverError::Stopped { kernel, reason });
            }
        }
        true
    }

    /// Advances a stream's next operation. Returns whether it is done.
    fn advance(&mut self, stream: usize) -> Result<bool, SimError> {
        // Mostly few steps, so that kernels interleave finely, and sometimes many.
        let most = 1 << self.draw(6);
        let (steps, seed) = (1 + self.draw(most), self.draw(u64::MAX - 1));
        let steps = if self.seed == 0 { u64::MAX } else { steps };
        let (_, queue, running) = &mut self.streams[stream];
        match queue.front() {
            Some(Operation::Kernel { name, shape, argument }) => {
                let kernel = match running {
                    Some(kernel) => kernel,
                    None => {
                        let shared_bytes = shape.shared_bytes as usize;
                        let LaunchShape { blocks, threads, .. } = *shape;
                        let launch = Launch { blocks, threads, shared_bytes, seed };
                        // SAFETY: the caller of `Driver::launch` guarantees the conditions of `begin` until
                        // the kernel has ended. This thread executes it only before that.
                        running.insert(unsafe { Running::begin(name, launch, &[(**argument).clone()])? })
                    }
                };
                let done = kernel.advance(steps)?;
                if done {
                    *running = None;
                }
                Ok(done)
            }
            Some(&Operation::Copy { from, to, bytes }) => {
                // SAFETY: the caller of `Driver::copy` guarantees that both ranges stay allocated and that no
                // access races with the copy, until it has ended.
                unsafe { std::ptr::copy(from as *const u8, to as *mut u8, bytes) };
                Ok(true)
            }
            Some(&Operation::Record(event)) => {
                self.fired.insert(event);
                Ok(true)
            }
            Some(Operation::Follow(_)) | None => Ok(true),
        }
    }
}

pub(crate) fn stopped(kernel: &str, reason: &str) -> DriverError {
    DriverError::Stopped { kernel: kernel.to_owned(), reason: reason.to_owned() }
}
