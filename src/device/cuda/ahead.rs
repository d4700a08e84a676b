//! Kernels compiled ahead of time: `build.rs` compiles them when it finds nvcc.
//!
//! Each image is a bundle: machine code for compute 7.5, 8.0 and 9.0, and PTX for newer devices. A program
//! built without nvcc has no images and compiles its kernels with NVRTC when it starts.

use super::compile::Image;
use super::context::Compute;
use super::sources::KernelFile;

mod made {
    include!(concat!(env!("OUT_DIR"), "/ahead.rs"));
}

/// The oldest compute capability in a bundle.
const OLDEST: Compute = Compute::from_number(75);

/// The program's images of these kernels, if they run on a device of this capability.
///
/// # Errors
/// Why there are none, as a clause of a sentence.
pub(crate) fn images(kernels: &[KernelFile], compute: Compute) -> Result<Vec<Image>, String> {
    let Some(compiler) = made::COMPILER else {
        return Err("this program was built without nvcc".to_owned());
    };
    if compute < OLDEST {
        return Err(format!("the program's own kernels need compute {OLDEST} or newer, got {compute}"));
    }
    let image = |kernel: &KernelFile| {
        let (_, bytes) = made::IMAGES
            .iter()
            .find(|(name, _)| *name == kernel.name)
            .ok_or_else(|| format!("the program does not contain {}", kernel.name))?;
        Ok(Image { kernel: *kernel, bytes: (*bytes).into(), origin: format!("{compiler}, ahead of time") })
    };
    kernels.iter().map(image).collect()
}

#[cfg(test)]
mod tests;
