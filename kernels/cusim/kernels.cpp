// The kernels that cusim can launch. Compiled with -fsanitize=thread, so that each of their loads and stores
// is a preemption point.
#include "../copy_rows.cu"
#include "../gather_pool.cu"
#include "../list.cu"
#include "../probe.cu"
#include "../replace.cu"
#include "../scratch.cu"
#include "../sweep.cu"
#include "../update.cu"
#include "planted.cu"

namespace cusim {

#define KERNEL(function) {#function, Call<&function>::argument_bytes, &Call<&function>::call}
extern const Kernel KERNELS[] = {
    KERNEL(probe),
    KERNEL(copy_rows),
    KERNEL(gather_pool),
    KERNEL(copy_in),
    KERNEL(link_keys),
    KERNEL(sample_ages),
    KERNEL(sweep),
    KERNEL(list_entries),
    KERNEL(take_records),
    KERNEL(put_records),
    KERNEL(update_rows),
    KERNEL(reverse_with_barrier),
    KERNEL(reverse_without_barrier),
    KERNEL(count_atomically),
    KERNEL(count_plainly),
    KERNEL(warp_sums),
    KERNEL(warp_match),
    KERNEL(barriers_apart),
    KERNEL(barrier_against_ballot),
    KERNEL(ballot_outside_mask),
    KERNEL(shuffle_outside_mask),
    KERNEL(spin_for_ever),
    KERNEL(pass_message),
    KERNEL(read_again),
    KERNEL(count_blocks),
    KERNEL(count_blocks_without_fences),
    KERNEL(fold_numbers),
};
extern const size_t KERNEL_COUNT = sizeof(KERNELS) / sizeof(KERNELS[0]);

}  // namespace cusim
