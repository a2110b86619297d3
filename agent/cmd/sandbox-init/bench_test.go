//go:build integration

package main_test

import (
	"bufio"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/fast-sandbox/fast-sandbox/internal/testkit"
)

// BenchmarkClaim measures what a waiting slot costs and how long a claim takes, from the connection to the end of the
// stream: go test -tags integration -run - -bench Claim -benchtime 50x ./agent/cmd/sandbox-init
func BenchmarkClaim(b *testing.B) {
	lower := image(b, nil)
	slots := make([]*container, b.N)
	for i := range slots {
		slots[i] = start(b)
	}
	// A slot that has its socket is idle.
	for _, s := range slots {
		require.Eventually(b, func() bool { _, err := os.Stat(s.fsb + "/claim.sock"); return err == nil }, testkit.Timeout, testkit.Tick)
	}
	memory := map[string]int{}
	for _, s := range slots {
		for key, kib := range rollup(b, s.pid) {
			memory[key+"-KiB"] += kib
		}
		threads, err := os.ReadDir(fmt.Sprintf("/proc/%d/task", s.pid))
		require.NoError(b, err)
		memory["threads"] += len(threads)
	}
	var all, connected, built, executed []time.Duration
	b.ResetTimer()
	for _, s := range slots {
		fd, what := mount(b, lower), newClaim(b, 1000, "sh", "-c", "exec sleep 1000")
		began := time.Now()
		conn := s.connect(b)
		connected = append(connected, time.Since(began))
		require.NoError(b, conn.Send(deadline(b), what, fd))
		built = append(built, time.Since(began))
		require.NoError(b, conn.Go(deadline(b)))
		all = append(all, time.Since(began))
		executed = append(executed, all[len(all)-1]-built[len(built)-1])
	}
	b.StopTimer()
	b.ReportMetric(0, "ns/op")
	for name, list := range map[string][]time.Duration{"claim": all, "connect": connected, "go": executed} {
		slices.Sort(list)
		b.ReportMetric(float64(list[len(list)/2])/1e6, name+"-p50-ms")
		b.ReportMetric(float64(list[len(list)*9/10])/1e6, name+"-p90-ms")
	}
	for key, kib := range memory {
		b.ReportMetric(float64(kib)/float64(b.N), key)
	}
}

// rollup reads /proc/PID/smaps_rollup.
func rollup(t testing.TB, pid int) map[string]int {
	f, err := os.Open(fmt.Sprintf("/proc/%d/smaps_rollup", pid))
	require.NoError(t, err)
	defer func() { _ = f.Close() }()
	found := map[string]int{}
	for scanner := bufio.NewScanner(f); scanner.Scan(); {
		key, value, _ := strings.Cut(scanner.Text(), ":")
		if key == "Rss" || key == "Pss" || key == "Private_Dirty" || key == "Pss_Anon" || key == "Pss_File" {
			kib, err := strconv.Atoi(strings.Fields(value)[0])
			require.NoError(t, err)
			found[strings.ToLower(key)] = kib
		}
	}
	return found
}
