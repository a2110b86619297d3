package inside

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	processv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/process/v1"
	"github.com/fast-sandbox/fast-sandbox/tests/bench/internal/mesh"
)

// program ends at once.
const program = "/bin/true"

// commands has each round run the program once with containerd's client and once with RunProcess.
func (s *suite) commands(ctx context.Context) (err error) {
	container, remove, err := s.raw.Container(ctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, remove(context.WithoutCancel(ctx))) }()
	for i := range s.Rounds + warmups {
		at := time.Now()
		took, err := s.raw.Exec(ctx, container, program)
		if err != nil {
			return err
		}
		s.add(RawExec, i, at, took)
		at = time.Now()
		if err := s.run(ctx, s.processes); err != nil {
			return err
		}
		s.add(Run, i, at, time.Since(at))
	}
	return nil
}

// atAgent runs the program without the gateway between.
func (s *suite) atAgent(ctx context.Context) error {
	ctx, conn, err := s.Agent(ctx, s.sandbox)
	if err != nil {
		return err
	}
	client := processv1.NewProcessServiceClient(conn)
	for i := range s.Rounds + warmups {
		at := time.Now()
		if err := s.run(ctx, client); err != nil {
			return err
		}
		s.add(RunAgent, i, at, time.Since(at))
	}
	return nil
}

// run runs the program once.
func (s *suite) run(ctx context.Context, client processv1.ProcessServiceClient) error {
	resp, err := client.RunProcess(ctx, &processv1.RunProcessRequest{
		Namespace: mesh.Namespace, Name: s.sandbox.GetName(), Process: &processv1.ProcessSpec{Args: []string{program}},
	})
	if err != nil {
		return fmt.Errorf("running a process: %w", err)
	}
	if code := resp.GetExit().GetCode(); code != 0 {
		return fmt.Errorf("%s exited with %d", program, code)
	}
	return nil
}

// throughput runs the program by several callers at once.
func (s *suite) throughput(ctx context.Context) error {
	var n atomic.Int64
	errs := make([]error, s.Parallel)
	began := time.Now()
	var wg sync.WaitGroup
	for i := range errs {
		wg.Go(func() {
			for time.Since(began) < s.Duration && errs[i] == nil {
				if errs[i] = s.run(ctx, s.processes); errs[i] == nil {
					n.Add(1)
				}
			}
		})
	}
	wg.Wait()
	took := time.Since(began)
	s.report.Value("runs_per_second", float64(n.Load())/took.Seconds(), "/s", fmt.Sprintf("RunProcess a second, %d at once", s.Parallel))
	return errors.Join(errs...)
}

// add adds a sample, unless it is of a warm-up.
func (s *suite) add(series string, i int, at time.Time, took time.Duration) {
	if i >= warmups {
		s.report.Sample(series, i-warmups, at, millis(took), "ms", "")
	}
}

func millis(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }
