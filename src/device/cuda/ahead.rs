//! Kernels that were compiled when the program was: `build.rs` does it where it finds nvcc.
//!
//! Each image is a bundle: machine code for compute 7.5, 8.0 and 9.0, and PTX for whatever is newer. A
//! program that was built without nvcc has none, and compiles with NVRTC when it starts.

use super::compile::Image;
use super::sources::KernelFile;

mod made {
    include!(concat!(env!("OUT_DIR"), "/ahead.rs"));
}

/// The oldest capability in a bundle.
const OLDEST: (i32, i32) = (7, 5);

/// The images of these kernels that this program carries, when they fit the device.
///
/// # Errors
/// Why there is none, as a part of a sentence.
pub fn images(kernels: &[KernelFile], compute: (i32, i32)) -> Result<Vec<Image>, String> {
    let Some(compiler) = made::COMPILER else {
        return Err("this program was built without nvcc".to_owned());
    };
    if compute < OLDEST {
        let ((major, minor), (device_major, device_minor)) = (OLDEST, compute);
        return Err(format!(
            "the program's own kernels are for compute {major}.{minor} and newer, not {device_major}.{device_minor}"
        ));
    }
    let image = |kernel: &KernelFile| {
        let (_, bytes) = made::IMAGES
            .iter()
            .find(|(name, _)| *name == kernel.name)
            .ok_or_else(|| format!("the program does not carry {}", kernel.name))?;
        Ok(Image { kernel: *kernel, bytes: (*bytes).into(), origin: format!("{compiler}, ahead of time") })
    };
    kernels.iter().map(image).collect()
}

#[cfg(test)]
mod tests;
