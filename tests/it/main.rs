//! Integration tests, one binary: a module a subject.

mod batcher;
mod server;
mod serving;
mod wire;
