//! Runs a property on a real GPU if there is one and, with the feature cusim, on the stub driver, whose
//! kernels the simulator executes (`device/cusim/stub.rs`).

use std::sync::Arc;

use crate::device::cuda::context::usable;
use crate::device::cuda::{Nvidia, open};
use crate::skip::{skip, skip_part};
use crate::stub_driver::is_child;

pub(crate) fn nvidia() -> Arc<Nvidia> {
    Arc::new(open(0, None).unwrap())
}

/// Runs a property on a real GPU, or prints why not. Does nothing in a child process of a test.
pub(crate) fn on_a_real_gpu(property: impl Fn(&Arc<Nvidia>)) {
    if is_child() {
        return;
    }
    match usable(0) {
        Ok(_) => property(&nvidia()),
        Err(reason) => {
            let skip = if cfg!(feature = "cusim") { skip_part } else { skip };
            skip(&format!("no real GPU: {reason}"));
        }
    }
}

macro_rules! on_every_gpu {
    ($($name:ident: $property:expr;)*) => {
        $(#[test]
        fn $name() {
            #[cfg(feature = "cusim")]
            crate::stub_driver::Machine::whole().runs(|_| {
                crate::device::cusim::stub::execute_kernels();
                $property(&$crate::device::cuda::tests::every_gpu::nvidia());
            });
            $crate::device::cuda::tests::every_gpu::on_a_real_gpu($property);
        })*
    };
}
pub(crate) use on_every_gpu;
