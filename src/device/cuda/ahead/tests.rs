use super::super::sources::KERNELS;
use super::*;

#[test]
fn every_kernel_has_an_image_or_there_is_a_reason() {
    match images(KERNELS, Compute::from_number(90)) {
        Ok(found) => {
            let names: Vec<&str> = found.iter().map(|image| image.kernel.name).collect();
            assert_eq!(names, KERNELS.iter().map(|kernel| kernel.name).collect::<Vec<_>>());
            // A bundle begins with its magic number.
            assert!(found.iter().all(|image| image.bytes.starts_with(&0xba55_ed50_u32.to_le_bytes())));
            assert!(images(KERNELS, Compute::from_number(70)).unwrap_err().contains("7.5 or newer, got 7.0"));
            let other = KernelFile { name: "other", ..KERNELS[0] };
            assert!(
                images(&[other], Compute::from_number(90)).unwrap_err().contains("does not contain other")
            );
        }
        Err(reason) => {
            crate::skip::skip_part(&reason);
            assert!(reason.contains("without nvcc"));
        }
    }
}
