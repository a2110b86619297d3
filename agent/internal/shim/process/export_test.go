package process

import "golang.org/x/sys/unix"

// Ignore makes this program ignore a signal.
func Ignore(n unix.Signal) error {
	_, err := changeAction(n, &action{handler: ignoreHandler})
	return err
}
