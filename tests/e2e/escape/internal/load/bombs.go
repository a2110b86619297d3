package load

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fast-sandbox/fast-sandbox/tests/e2e/escape/internal/attack"
)

const (
	// forkChild and memoryChild are the loads of processes that a bomb starts.
	forkChild   = "fork-child"
	memoryChild = "memory-child"
	// maxProcesses, maxMemory, maxDisk, maxInodes and maxDescriptors bound a bomb that nothing else bounds.
	maxProcesses   = 20_000
	maxMemory      = 4 << 30
	maxDisk        = 4 << 30
	maxInodes      = 500_000
	maxDescriptors = 1_000_000
	// childSeconds is how long a process of a bomb runs if it is not ended.
	childSeconds = "120"
	spinners     = 64
)

// spin computes on more threads than there are processors.
func spin(ctx context.Context, _ *output, _ *attack.Env, _ []string) (int64, error) {
	var n atomic.Int64
	var threads sync.WaitGroup
	for range spinners {
		threads.Go(func() {
			runtime.LockOSThread()
			for ctx.Err() == nil {
				n.Add(1)
			}
		})
	}
	threads.Wait()
	return n.Load(), nil
}

// fork starts a process that forks, as all that it forks do. Count is the largest number of processes at once. It runs only in a
// sandbox, which ends all others with it.
func fork(ctx context.Context, o *output, _ *attack.Env, _ []string) (int64, error) {
	if !inSandbox() {
		return 0, errors.New("forking: not in a sandbox")
	}
	reserveThreads() // later there may be none
	child := exec.Command("/proc/self/exe", forkChild, childSeconds)
	child.Args[0] = attack.Program
	if err := child.Start(); err != nil {
		return 0, fmt.Errorf("forking: %w", err)
	}
	most := int64(0)
	for wait(ctx, countPause) {
		entries, _ := filepath.Glob("/proc/[0-9]*")
		if now := int64(len(entries)); now > most {
			most = now
			o.line(Line{Kind: KindCount, Count: most})
		}
		if most > maxProcesses {
			break
		}
	}
	_ = unix.Kill(-1, unix.SIGKILL) // all but itself
	return most, nil
}

// inSandbox keeps a bomb from other machines: this is the program of the hostile images, and it or sandbox-init is the first process.
func inSandbox() bool {
	first, _ := os.ReadFile("/proc/1/comm")
	exe, err := os.Executable()
	return err == nil && exe == attack.Program && (os.Getpid() == 1 || bytes.HasPrefix(first, []byte("sandbox-init")))
}

// countPause is the time between two counts, which take time themselves.
const countPause = 200 * time.Millisecond

// reserveThreads makes the runtime keep some idle threads.
func reserveThreads() {
	const threads = 12
	var ready, release sync.WaitGroup
	release.Add(1)
	for range threads {
		ready.Add(1)
		go func() {
			runtime.LockOSThread()
			defer runtime.UnlockOSThread()
			ready.Done()
			release.Wait()
		}()
	}
	ready.Wait()
	release.Done()
}

// forkForever forks until it is ended. It uses nothing of the Go runtime, of which a forked process has one thread alone.
func forkForever(context.Context, *output, *attack.Env, []string) (int64, error) {
	if !inSandbox() {
		return 0, errors.New("forking: not in a sandbox")
	}
	for {
		_, _, _ = unix.RawSyscall(unix.SYS_CLONE, uintptr(unix.SIGCHLD), 0, 0)
	}
}

// memory has a child allocate until the kernel ends it, again and again. Count is the largest amount that one had.
func memory(ctx context.Context, o *output, _ *attack.Env, _ []string) (int64, error) {
	most := int64(0)
	for ctx.Err() == nil {
		cmd := exec.CommandContext(ctx, "/proc/self/exe", memoryChild, childSeconds)
		cmd.Args[0] = attack.Program
		cmd.WaitDelay = time.Second
		var progress bytes.Buffer
		cmd.Stdout = &progress
		err := cmd.Run()
		had := int64(bytes.Count(progress.Bytes(), []byte(`"kind":"`+KindCount+`"`))) * memoryStep
		if had > most {
			most = had
			o.line(Line{Kind: KindCount, Count: most})
		}
		if err == nil || had == 0 {
			break // it was not ended by the kernel
		}
	}
	return most, nil
}

const memoryStep = 16 << 20

// allocate touches more and more memory, and prints a line for each step.
func allocate(ctx context.Context, o *output, _ *attack.Env, _ []string) (int64, error) {
	for n := int64(0); n < maxMemory && ctx.Err() == nil; n += memoryStep {
		block, err := unix.Mmap(-1, 0, memoryStep, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON)
		if err != nil {
			return n, fmt.Errorf("allocating: %w", err)
		}
		for i := 0; i < len(block); i += 4096 {
			block[i] = 1
		}
		o.line(Line{Kind: KindCount, Count: n + memoryStep})
	}
	return maxMemory, nil
}

// disk writes to its file system. Count is in bytes.
func disk(ctx context.Context, o *output, _ *attack.Env, _ []string) (int64, error) {
	block := make([]byte, 1<<20)
	for i := range block {
		block[i] = byte(i * 7)
	}
	f, err := os.CreateTemp("", "disk-")
	if err != nil {
		return 0, fmt.Errorf("writing: %w", err)
	}
	defer func() { _ = f.Close(); _ = os.Remove(f.Name()) }()
	total := int64(0)
	for ctx.Err() == nil && total < maxDisk {
		n, err := f.Write(block)
		total += int64(n)
		if total%(64<<20) == 0 {
			o.line(Line{Kind: KindCount, Count: total})
		}
		if err != nil {
			return total, fmt.Errorf("writing: %w", err)
		}
	}
	<-ctx.Done() // so that the one who measures finds it
	return total, nil
}

// inodes makes empty files.
func inodes(ctx context.Context, o *output, _ *attack.Env, _ []string) (int64, error) {
	dir, err := os.MkdirTemp("", "inodes-")
	if err != nil {
		return 0, fmt.Errorf("making files: %w", err)
	}
	total := int64(0)
	for ctx.Err() == nil && total < maxInodes {
		sub := filepath.Join(dir, strconv.FormatInt(total/1000, 10))
		_ = os.Mkdir(sub, 0o755)
		fd, err := unix.Open(filepath.Join(sub, strconv.FormatInt(total, 10)), unix.O_CREAT|unix.O_WRONLY|unix.O_CLOEXEC, 0o600)
		if err != nil {
			return total, fmt.Errorf("making files: %w", err)
		}
		_ = unix.Close(fd)
		if total++; total%5000 == 0 {
			o.line(Line{Kind: KindCount, Count: total})
		}
	}
	<-ctx.Done()
	return total, nil
}

// log prints as fast as it can.
func log(ctx context.Context, _ *output, _ *attack.Env, _ []string) (int64, error) {
	line := append(bytes.Repeat([]byte(Filler), 4095), '\n')
	total := int64(0)
	for ctx.Err() == nil {
		n, err := os.Stdout.Write(line)
		total += int64(n)
		if err != nil {
			return total, fmt.Errorf("printing: %w", err)
		}
	}
	return total, nil
}

// files opens files until it is refused. Count is their number.
func files(ctx context.Context, o *output, _ *attack.Env, _ []string) (int64, error) {
	return hold(ctx, o, func() (int, error) { return unix.Open("/dev/null", unix.O_RDONLY|unix.O_CLOEXEC, 0) })
}

// inotify takes inotify instances until none is left for its user. Count is their number.
func inotify(ctx context.Context, o *output, _ *attack.Env, _ []string) (int64, error) {
	return hold(ctx, o, func() (int, error) { return unix.InotifyInit1(unix.IN_CLOEXEC) })
}

// hold opens descriptors until that is refused, and holds them until ctx ends.
func hold(ctx context.Context, o *output, open func() (int, error)) (int64, error) {
	var held []int
	defer func() {
		for _, fd := range held {
			_ = unix.Close(fd)
		}
	}()
	reason := "there is no end"
	for ctx.Err() == nil && len(held) < maxDescriptors {
		fd, err := open()
		if err != nil {
			reason = err.Error()
			break
		}
		held = append(held, fd)
	}
	o.line(Line{Kind: KindCount, Count: int64(len(held)), Text: reason})
	<-ctx.Done()
	return int64(len(held)), nil
}
