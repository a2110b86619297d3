package main

import (
	"os"
	"path/filepath"
	"runtime"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// TestDescriptorIsClosedOnce: the descriptor of a connection soon belongs to another file, which must stay open when memory is collected.
func TestDescriptorIsClosedOnce(t *testing.T) {
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	require.NoError(t, err)
	conn, err := connOf(pair[0])
	require.NoError(t, err)
	defer conn.Close()
	fd, err := unix.Open(filepath.Join(t.TempDir(), "file"), unix.O_RDWR|unix.O_CREAT|unix.O_CLOEXEC, 0o600)
	require.NoError(t, err)
	defer func() { require.NoError(t, unix.Close(fd)) }()
	require.Equal(t, pair[0], fd, "the kernel gives the lowest number")
	for range 3 {
		runtime.GC()
	}
	_, err = unix.Write(fd, []byte("x"))
	require.NoError(t, err)

	peer := os.NewFile(uintptr(pair[1]), "peer")
	defer peer.Close()
	_, err = peer.WriteString("y")
	require.NoError(t, err)
	b := make([]byte, 2)
	n, err := conn.Read(b)
	require.NoError(t, err)
	require.Equal(t, "y", string(b[:n]))
}

// TestOtherDescriptors: what is no unix socket is no connection.
func TestOtherDescriptors(t *testing.T) {
	fd, err := unix.Open(os.DevNull, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	require.NoError(t, err)
	_, err = connOf(fd)
	require.Error(t, err)
	_, err = unix.FcntlInt(uintptr(fd), unix.F_GETFD, 0)
	require.Equal(t, unix.EBADF, err)
}
