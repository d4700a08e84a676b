//! Integration tests, one binary: a module a subject.

mod store;
mod store_crash;
