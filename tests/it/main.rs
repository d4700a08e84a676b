//! Integration tests, one binary: a module a subject.

mod server;
mod serving;
mod wire;
