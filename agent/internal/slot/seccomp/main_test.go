package seccomp_test

import (
	"encoding/binary"
	"flag"
	"fmt"
	"io"
	"os"
	"runtime"
	"testing"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"
)

// childFlag makes the test's binary a process that loads the program it reads from its standard input and makes one call.
const childFlag = "confined-child"

func TestMain(m *testing.M) {
	number := flag.Int(childFlag, -1, "make this system call under the filter on the standard input")
	first := flag.Uint64("first", 0, "its first argument")
	flag.Parse()
	if *number >= 0 {
		child(uintptr(*number), uintptr(*first))
	}
	goleak.VerifyTestMain(m)
}

// child prints the errno of the call that it makes once it is confined.
func child(number, first uintptr) {
	runtime.LockOSThread()
	raw, err := io.ReadAll(os.Stdin)
	if err != nil || len(raw) == 0 || len(raw)%8 != 0 {
		os.Exit(3)
	}
	filters := make([]unix.SockFilter, 0, len(raw)/8)
	for i := 0; i < len(raw); i += 8 {
		filters = append(filters, unix.SockFilter{
			Code: binary.NativeEndian.Uint16(raw[i:]), Jt: raw[i+2], Jf: raw[i+3], K: binary.NativeEndian.Uint32(raw[i+4:]),
		})
	}
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		os.Exit(4)
	}
	if err := load(filters); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(5)
	}
	_, _, errno := unix.RawSyscall6(number, first, 0, 0, 0, 0, 0)
	fmt.Println(int(errno))
	os.Exit(0)
}
