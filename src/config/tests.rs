//! Layers, defaults and refused values; also generates `docs/settings.md` and compares it with the file.

mod cache;
mod fuzz;
mod layers;
mod page;
mod per_model;
mod refused;
mod reload;
mod resolved;
mod sections;

use super::*;
use resolved::{layers, refusal, resolve};
